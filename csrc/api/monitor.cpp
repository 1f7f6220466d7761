// SPDX-License-Identifier: BSD-3-Clause
#include <cstdio>
#include <exception>
#include <gpumemx/monitor.hpp>
#include <utility>

#include "adapter/device_view.hpp"
#include "api/device.hpp"

namespace gpumemx {

struct GPUMonitor::State {
  State(std::string its_name, ReportFunction its_on_end, int index)
      : name(std::move(its_name)), on_end(std::move(its_on_end)), device(index), scope(index) {}

  std::string name;
  ReportFunction on_end;
  int device;
  adapter::Scope scope;
  bool is_over = false;
};

namespace {

const std::string kNoName;

void call(const ReportFunction& on_end, const GPUMonitor& monitor) {
  try {
    on_end(monitor);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpumemx: the report of the monitor '%s' failed: %s\n",
                 monitor.name().c_str(), error.what());
  } catch (...) {
    std::fprintf(stderr, "gpumemx: the report of the monitor '%s' failed\n",
                 monitor.name().c_str());
  }
}

}  // namespace

GPUMonitor::GPUMonitor(std::string name, ReportFunction on_end, int device)
    : state_(
          std::make_unique<State>(std::move(name), std::move(on_end), api::device_index(device))) {}
GPUMonitor::GPUMonitor(std::string name, int device)
    : GPUMonitor(std::move(name), nullptr, device) {}
GPUMonitor::~GPUMonitor() { end(); }
GPUMonitor::GPUMonitor(GPUMonitor&& other) noexcept = default;

GPUMonitor& GPUMonitor::operator=(GPUMonitor&& other) noexcept {
  if (this == &other) return *this;
  end();
  state_ = std::move(other.state_);
  return *this;
}

void GPUMonitor::end() {
  if (state_ == nullptr || std::exchange(state_->is_over, true)) return;
  (void)state_->scope.end();
  if (state_->on_end) call(state_->on_end, *this);
}

const std::string& GPUMonitor::name() const { return state_ ? state_->name : kNoName; }
int GPUMonitor::device() const { return state_ ? state_->device : 0; }

namespace {

template <class State>
ScopeFigures figures(const std::unique_ptr<State>& state) {
  return state == nullptr ? ScopeFigures{} : state->scope.read();
}

}  // namespace

std::uint64_t GPUMonitor::before() const { return figures(state_).before.n; }
std::uint64_t GPUMonitor::after() const { return figures(state_).after.n; }
std::int64_t GPUMonitor::delta() const { return figures(state_).delta(); }
std::uint64_t GPUMonitor::peak() const { return figures(state_).peak.n; }
std::uint64_t GPUMonitor::allocations() const { return figures(state_).allocations; }
std::uint64_t GPUMonitor::driver_calls() const { return figures(state_).driver_calls; }
double GPUMonitor::driver_seconds() const { return figures(state_).driver_seconds; }
bool GPUMonitor::exact() const { return state_ != nullptr && state_->scope.exact(); }
std::string GPUMonitor::report() const {
  return state_ == nullptr ? "" : state_->scope.report(state_->name);
}

void print_report(const GPUMonitor& monitor) {
  std::fprintf(stderr, "%s\n", monitor.report().c_str());
}

}  // namespace gpumemx
