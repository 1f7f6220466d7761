// SPDX-License-Identifier: BSD-3-Clause
//
// The simulated device under the contract suite. Work takes a little modelled time.
#include "driver/sim/sim_driver.hpp"
#include "support/contract_device.hpp"

namespace gpumemx {
namespace {

SimOptions small_device() {
  SimOptions options;
  options.capacity = 256_MiB;
  return options;
}

class SimContractDevice final : public ContractDevice {
 public:
  SimContractDevice() { gpu_.set_lag_us(10); }

  DeviceDriver& driver() override { return gpu_; }
  StreamRef new_stream() override { return gpu_.new_stream(); }
  void fill(StreamRef stream, AddrRange range, std::uint32_t value) override {
    gpu_.launch(stream, {writes(range, value)});
  }
  void check(StreamRef stream, AddrRange range, std::uint32_t value) override {
    gpu_.launch(stream, {reads(range, value)});
  }
  void hold(StreamRef stream) override { gpu_.set_manual(stream, true); }
  void let_go(StreamRef stream) override { gpu_.set_manual(stream, false); }
  void begin_capture(StreamRef stream, CaptureMode mode) override {
    gpu_.begin_capture(stream, mode);
  }
  bool end_capture(StreamRef stream) override { return gpu_.end_capture(stream).ok(); }
  std::string finish() override {
    gpu_.complete_all();
    std::string complaints;
    for (const std::string& text : gpu_.hazards()) complaints += text + "\n";
    gpu_.clear_hazards();
    return complaints;
  }
  void forget_complaints() override { gpu_.clear_hazards(); }
  bool is_alone() const override { return true; }

 private:
  SimDriver gpu_{small_device()};
};

}  // namespace

std::unique_ptr<ContractDevice> make_sim_contract_device(std::string&) {
  return std::make_unique<SimContractDevice>();
}

}  // namespace gpumemx
