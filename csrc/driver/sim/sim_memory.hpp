// SPDX-License-Identifier: BSD-3-Clause
//
// The memory of a simulated device: reserved ranges of addresses, handles, the mappings that join
// them, plain allocations, and what stands in each. The states are those of device_driver.hpp.
//
// Invariants: mappings are disjoint; each lies in one reserved range or is a plain allocation;
// created() is the sum over the pieces of memory that a handle or a plain allocation holds.
// Not thread-safe: owned by SimDriver, used under its mutex.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/result.hpp"
#include "driver/sim/address_space.hpp"
#include "driver/sim/contents.hpp"
#include "driver/sim/hazards.hpp"
#include "driver/sim/sim_options.hpp"

namespace gpumemx {

// The last work on one stream that touches a mapping. Work is numbered by stream: see SimStreams.
struct LastUse {
  StreamId stream{};
  std::uint64_t seq = 0;
};

// Why a call has no effect. A broken rule is a hazard; a full device is not.
struct Refusal {
  Errc code;
  std::string reason;
  bool is_hazard = false;
};

class SimMemory {
 public:
  struct Physical {
    explicit Physical(Bytes bytes) : size(bytes), contents(bytes) {}
    Bytes size;
    Contents contents;
    std::uint64_t handles = 0;  // handles that name it: one, and one more for each import
  };
  struct Mapping {
    Bytes size;
    std::shared_ptr<Physical> memory;
    HandleId handle{};         // none for a plain allocation
    std::uint64_t serial = 0;  // of the call that made it
    bool is_usable = false;
    std::vector<int> peers = {};     // other devices that may use it too
    std::vector<LastUse> uses = {};  // one for each stream; kept only when hazards are checked
  };
  using Mappings = std::map<DeviceAddr, Mapping>;

  explicit SimMemory(const SimOptions& options);
  ~SimMemory();
  SimMemory(const SimMemory&) = delete;
  SimMemory& operator=(const SimMemory&) = delete;

  // Each takes the serial number of the call that it carries out.
  Result<AddrRange> reserve(Bytes size, Bytes alignment);
  std::optional<Refusal> unreserve(AddrRange range, std::uint64_t serial);
  HandleId create(Bytes size);  // REQUIRES: size <= free()
  std::optional<Refusal> release(HandleId handle, std::uint64_t serial);
  std::optional<Refusal> map(AddrRange range, HandleId handle, std::uint64_t serial);
  std::optional<Refusal> set_access(AddrRange range, const std::vector<int>& peers);
  std::optional<Refusal> unmap(AddrRange range, std::uint64_t serial);
  std::optional<DeviceAddr> allocate(Bytes size, std::uint64_t serial);
  std::optional<Refusal> free(DeviceAddr address, std::uint64_t serial);
  // A file that says which memory it stands for, closed by release(). Nothing where none can be made.
  std::optional<int> export_handle(HandleId handle);  // REQUIRES: size_of(handle)
  std::optional<HandleId> import_handle(int fd);
  // Copies the contents. A text when some page of the two ranges is not USABLE.
  std::optional<std::string> copy(DeviceAddr to, DeviceAddr from, Bytes size);

  std::optional<Bytes> size_of(HandleId handle) const;
  // The mapping that begins at `begin`, or null.
  const Mapping* find(DeviceAddr begin) const;
  // Calls visit(const Mapping&) for those that overlap the range, in order.
  template <class Visit>
  void for_each_in(AddrRange range, Visit visit) const {
    for (auto it = first_over(range.begin); it != mappings_.end() && it->first < range.end();
         ++it) {
      visit(it->second);
    }
  }

  // The same with the address where each begins.
  template <class Visit>
  void for_each_begin_in(AddrRange range, Visit visit) const {
    for (auto it = first_over(range.begin); it != mappings_.end() && it->first < range.end();
         ++it) {
      visit(it->first);
    }
  }

  // Notes that `use` touches the range. A text when some page of it is not USABLE.
  std::optional<std::string> note_use(AddrRange range, LastUse use);
  // Runs one access: writes its tag, or compares. A text when it finds something wrong.
  std::optional<std::string> run(std::uint64_t serial, StreamId stream, const Access& access);

  void occupy(Bytes size) { occupied_ = size; }
  Bytes created() const { return created_; }
  Bytes free() const;
  std::uint64_t mapping_count() const { return mappings_.size() - plain_count_; }
  std::uint64_t handle_count() const { return handles_.size(); }
  bool is_empty() const;  // no handle, mapping, plain allocation or reserved range

 private:
  struct Handle {
    std::shared_ptr<Physical> memory;
    std::uint64_t mappings = 0;
    int fd = -1;  // exported as
  };

  Mappings::const_iterator first_over(DeviceAddr address) const;
  // Calls visit(mapping, offset in it, size) for the parts of the range in order; stops early and
  // returns a text at the first page that is not USABLE, or when visit returns one.
  template <class Visit>
  std::optional<std::string> walk(AddrRange range, Visit visit);
  bool lies_in_a_reserved_range(AddrRange range) const;
  void end(DriverCall call, std::uint64_t serial, AddrRange range, HandleId handle = {});
  HandleId add_handle(std::shared_ptr<Physical> memory);

  const SimOptions options_;
  AddressSpace addresses_;
  AddressSpace plain_addresses_;
  std::map<DeviceAddr, Bytes> reserved_;
  std::unordered_map<HandleId, Handle> handles_;
  Mappings mappings_;
  std::vector<std::weak_ptr<Physical>> exported_;  // by the number in the file
  CallHistory history_;
  Bytes created_;
  Bytes occupied_;
  std::uint64_t next_handle_ = 1;
  std::uint64_t usable_count_ = 0;  // mappings with access: what max_mappings limits
  std::uint64_t plain_count_ = 0;
};

}  // namespace gpumemx
