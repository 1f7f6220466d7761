// SPDX-License-Identifier: BSD-3-Clause
//
// Every refusal says which earlier call it collides with: a hazard is read by somebody who has only
// the text and the seed.
#include "driver/sim/sim_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace gpumemx {

namespace {

// Where addresses of a device begin: a device owns 2^48 of them, the upper half for plain
// allocations. Reserved ranges start at 16 TiB so that an address is never mistaken for a size.
constexpr std::uint64_t kDeviceStride = std::uint64_t{1} << 48;
constexpr std::uint64_t kReservedBase = std::uint64_t{1} << 44;
constexpr std::uint64_t kPlainBase = std::uint64_t{1} << 47;

// What an exported descriptor's file holds: whose memory, and which piece.
struct ExportedFile {
  std::uint64_t magic = 0x6770756d656d7873;
  const void* owner = nullptr;  // the device of this process
  std::int64_t process = 0;
  std::uint64_t index = 0;
};

AddrRange span_of(const SimOptions& options, std::uint64_t base, Bytes size) {
  return {DeviceAddr{options.device * kDeviceStride + base}, size};
}

Refusal broken(std::string reason) { return {Errc::kInvalidArgument, std::move(reason), true}; }

}  // namespace

SimMemory::SimMemory(const SimOptions& options)
    : options_(options),
      addresses_(span_of(options, kReservedBase, options.address_space)),
      plain_addresses_(span_of(options, kPlainBase, {kPlainBase})) {}

SimMemory::~SimMemory() {
  for (const auto& [id, handle] : handles_) {
    if (handle.fd >= 0) (void)::close(handle.fd);
  }
}

Result<AddrRange> SimMemory::reserve(Bytes size, Bytes alignment) {
  const std::optional<AddrRange> range = addresses_.take(size, alignment);
  if (!range) return Error{Errc::kOutOfAddressSpace, size, "no range of addresses is left"};
  reserved_.emplace(range->begin, range->size);
  return *range;
}

std::optional<Refusal> SimMemory::unreserve(AddrRange range, std::uint64_t serial) {
  const auto it = reserved_.find(range.begin);
  if (it == reserved_.end() || it->second != range.size) {
    return broken("not a whole reserved range" + history_.last_over(range));
  }
  const auto mapping = first_over(range.begin);
  if (mapping != mappings_.end() && mapping->first < range.end()) {
    return broken("still mapped by " + describe(PastCall{DriverCall::kMap,
                                                         mapping->second.serial,
                                                         {mapping->first, mapping->second.size},
                                                         mapping->second.handle}));
  }
  reserved_.erase(it);
  addresses_.give_back(range);
  end(DriverCall::kUnreserve, serial, range);
  return std::nullopt;
}

HandleId SimMemory::add_handle(std::shared_ptr<Physical> memory) {
  const HandleId id{next_handle_++};
  ++memory->handles;
  handles_.emplace(id, Handle{std::move(memory)});
  return id;
}

HandleId SimMemory::create(Bytes size) {
  created_ += size;
  return add_handle(std::make_shared<Physical>(size));
}

std::optional<Refusal> SimMemory::release(HandleId handle, std::uint64_t serial) {
  const auto it = handles_.find(handle);
  if (it == handles_.end()) return broken("no such handle" + history_.last_of(handle));
  if (it->second.mappings != 0) {
    for (const auto& [begin, mapping] : mappings_) {
      if (mapping.handle != handle) continue;
      return broken(
          "still mapped by " +
          describe(PastCall{DriverCall::kMap, mapping.serial, {begin, mapping.size}, handle}));
    }
  }
  if (it->second.fd >= 0) (void)::close(it->second.fd);
  if (--it->second.memory->handles == 0) created_ -= it->second.memory->size;
  handles_.erase(it);
  end(DriverCall::kRelease, serial, {}, handle);
  return std::nullopt;
}

std::optional<Refusal> SimMemory::map(AddrRange range, HandleId handle, std::uint64_t serial) {
  const auto it = handles_.find(handle);
  if (it == handles_.end()) return broken("no such handle" + history_.last_of(handle));
  if (it->second.memory->size != range.size) {
    return broken("the handle has " + std::to_string(it->second.memory->size.n) + " bytes");
  }
  if (range.begin.n % options_.granularity.n != 0) return broken("the range is not aligned");
  if (!lies_in_a_reserved_range(range)) {
    return broken("not in one reserved range" + history_.last_over(range));
  }
  const auto other = first_over(range.begin);
  if (other != mappings_.end() && other->first < range.end()) {
    return broken("already mapped by " + describe(PastCall{DriverCall::kMap,
                                                           other->second.serial,
                                                           {other->first, other->second.size},
                                                           other->second.handle}));
  }
  ++it->second.mappings;
  mappings_.emplace_hint(other, range.begin,
                         Mapping{range.size, it->second.memory, handle, serial, false});
  return std::nullopt;
}

std::optional<Refusal> SimMemory::set_access(AddrRange range, const std::vector<int>& peers) {
  for (const int peer : peers) {
    if (peer < 0 || peer >= static_cast<int>(options_.devices) ||
        peer == static_cast<int>(options_.device)) {
      return broken("device " + std::to_string(peer) + " is no peer of this one");
    }
  }
  const auto first = mappings_.find(range.begin);
  DeviceAddr end = range.begin;
  std::uint64_t newly = 0;
  for (auto it = first; end < range.end() && it != mappings_.end() && it->first == end; ++it) {
    if (it->second.handle == HandleId{}) return broken("a plain allocation is always accessible");
    end = end + it->second.size;
    if (!it->second.is_usable) ++newly;
  }
  if (end != range.end() || range.size.n == 0) {
    return broken("not the union of whole mappings" + history_.last_over(range));
  }
  if (usable_count_ + newly > options_.max_mappings) {
    return Refusal{Errc::kOutOfMemory, "the driver holds all the mappings it can"};
  }
  for (auto it = first; it != mappings_.end() && it->first < range.end(); ++it) {
    it->second.is_usable = true;
    for (const int peer : peers) {
      std::vector<int>& have = it->second.peers;
      if (std::find(have.begin(), have.end(), peer) == have.end()) have.push_back(peer);
    }
  }
  usable_count_ += newly;
  return std::nullopt;
}

std::optional<Refusal> SimMemory::unmap(AddrRange range, std::uint64_t serial) {
  const auto it = mappings_.find(range.begin);
  if (it == mappings_.end() || it->second.size != range.size || it->second.handle == HandleId{}) {
    return broken("not the range of one map()" + history_.last_over(range));
  }
  const HandleId handle = it->second.handle;
  --handles_.find(handle)->second.mappings;
  if (it->second.is_usable) --usable_count_;
  mappings_.erase(it);
  end(DriverCall::kUnmap, serial, range, handle);
  return std::nullopt;
}

std::optional<DeviceAddr> SimMemory::allocate(Bytes size, std::uint64_t serial) {
  const Bytes whole = round_up(size, {Contents::kGranule});
  if (whole > free()) return std::nullopt;
  // Large ones begin on a page, as the driver's do.
  const Bytes alignment =
      whole < options_.granularity ? Bytes{Contents::kGranule} : options_.granularity;
  const std::optional<AddrRange> range = plain_addresses_.take(whole, alignment);
  if (!range) return std::nullopt;
  created_ += whole;
  ++plain_count_;
  mappings_.emplace(range->begin,
                    Mapping{whole, std::make_shared<Physical>(whole), {}, serial, true});
  return range->begin;
}

std::optional<Refusal> SimMemory::free(DeviceAddr address, std::uint64_t serial) {
  const auto it = mappings_.find(address);
  if (it == mappings_.end() || it->second.handle != HandleId{}) {
    return broken("not a plain allocation" + history_.last_over({address, {1}}));
  }
  const AddrRange range{address, it->second.size};
  created_ -= range.size;
  --plain_count_;
  mappings_.erase(it);
  plain_addresses_.give_back(range);
  end(DriverCall::kFree, serial, range);
  return std::nullopt;
}

std::optional<int> SimMemory::export_handle(HandleId handle) {
  Handle& found = handles_.find(handle)->second;
  if (found.fd >= 0) return found.fd;
  const int fd = ::memfd_create("gpumemx-sim", MFD_CLOEXEC);
  if (fd < 0) return std::nullopt;
  ExportedFile file;
  file.owner = this;
  file.process = ::getpid();
  file.index = exported_.size();
  if (::pwrite(fd, &file, sizeof file, 0) != sizeof file) {
    (void)::close(fd);
    return std::nullopt;
  }
  exported_.push_back(found.memory);
  found.fd = fd;
  return fd;
}

std::optional<HandleId> SimMemory::import_handle(int fd) {
  ExportedFile file;
  const std::uint64_t magic = std::exchange(file.magic, 0);
  if (::pread(fd, &file, sizeof file, 0) != sizeof file || file.magic != magic ||
      file.owner != this || file.process != ::getpid() || file.index >= exported_.size()) {
    return std::nullopt;
  }
  std::shared_ptr<Physical> memory = exported_[file.index].lock();
  // A piece of memory can outlive its last handle inside a running call; it is gone all the same.
  if (!memory || memory->handles == 0) return std::nullopt;
  return add_handle(std::move(memory));
}

std::optional<std::string> SimMemory::copy(DeviceAddr to, DeviceAddr from, Bytes size) {
  // The runs as they are now, before anything is written.
  std::vector<std::pair<Bytes, Contents::Run>> runs;  // where from `from` on
  Bytes at;
  auto wrong = walk({from, size}, [&](Mapping& mapping, std::uint64_t offset, std::uint64_t part) {
    for (const Contents::Run& run : mapping.memory->contents.runs_in(offset, part)) {
      runs.emplace_back(at + Bytes{run.begin * Contents::kGranule - offset}, run);
    }
    at += Bytes{part};
    return std::optional<std::string>();
  });
  if (wrong) return wrong;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Bytes begin = runs[i].first;
    const Bytes end = i + 1 < runs.size() ? runs[i + 1].first : size;
    wrong = walk(
        {to + begin, end - begin}, [&](Mapping& mapping, std::uint64_t offset, std::uint64_t part) {
          mapping.memory->contents.write(offset, part, runs[i].second.tag, runs[i].second.writer);
          return std::optional<std::string>();
        });
    if (wrong) return wrong;
  }
  return std::nullopt;
}

std::optional<Bytes> SimMemory::size_of(HandleId handle) const {
  const auto it = handles_.find(handle);
  if (it == handles_.end()) return std::nullopt;
  return it->second.memory->size;
}

const SimMemory::Mapping* SimMemory::find(DeviceAddr begin) const {
  const auto it = mappings_.find(begin);
  return it == mappings_.end() ? nullptr : &it->second;
}

SimMemory::Mappings::const_iterator SimMemory::first_over(DeviceAddr address) const {
  auto it = mappings_.upper_bound(address);
  if (it != mappings_.begin()) {
    const auto before = std::prev(it);
    if (address < before->first + before->second.size) return before;
  }
  return it;
}

template <class Visit>
std::optional<std::string> SimMemory::walk(AddrRange range, Visit visit) {
  DeviceAddr at = range.begin;
  auto it = mappings_.upper_bound(at);
  if (it != mappings_.begin()) --it;
  while (at < range.end()) {
    const bool is_mapped =
        it != mappings_.end() && it->first <= at && at < it->first + it->second.size;
    if (!is_mapped) {
      return "nothing is mapped at " + describe(at) + history_.last_over({at, {1}});
    }
    const DeviceAddr end = it->first + it->second.size;
    if (!it->second.is_usable) {
      return "no access was set at " + describe(at) + ", mapped by " +
             describe(PastCall{DriverCall::kMap,
                               it->second.serial,
                               {it->first, it->second.size},
                               it->second.handle});
    }
    const DeviceAddr stop = end < range.end() ? end : range.end();
    if (auto found = visit(it->second, (at - it->first).n, (stop - at).n)) return found;
    at = stop;
    ++it;
  }
  return std::nullopt;
}

std::optional<std::string> SimMemory::note_use(AddrRange range, LastUse use) {
  return walk(range, [&](Mapping& mapping, std::uint64_t, std::uint64_t) {
    for (LastUse& last : mapping.uses) {
      if (last.stream != use.stream) continue;
      last.seq = std::max(last.seq, use.seq);
      return std::optional<std::string>();
    }
    mapping.uses.push_back(use);
    return std::optional<std::string>();
  });
}

std::optional<std::string> SimMemory::run(std::uint64_t serial, StreamId stream,
                                          const Access& access) {
  return walk(access.range,
              [&](Mapping& mapping, std::uint64_t offset,
                  std::uint64_t size) -> std::optional<std::string> {
                Contents& contents = mapping.memory->contents;
                if (access.write) {
                  contents.write(offset, size, access.tag, {serial, stream, access.range});
                  return std::nullopt;
                }
                const Contents::Run* other = contents.find_other(offset, size, access.tag);
                if (other == nullptr) return std::nullopt;
                if (other->writer.serial == 0) {
                  return "reads what was never written, of the memory of " +
                         describe(PastCall{mapping.handle == HandleId{} ? DriverCall::kAllocate
                                                                        : DriverCall::kMap,
                                           mapping.serial,
                                           {},
                                           mapping.handle});
                }
                return "finds tag " + std::to_string(other->tag) + ", left by " +
                       describe(other->writer.serial, other->writer.stream,
                                writes(other->writer.range, other->tag));
              });
}

Bytes SimMemory::free() const {
  const Bytes taken = created_ + occupied_;
  return taken < options_.capacity ? options_.capacity - taken : Bytes{};
}

bool SimMemory::is_empty() const {
  return handles_.empty() && mappings_.empty() && reserved_.empty();
}

bool SimMemory::lies_in_a_reserved_range(AddrRange range) const {
  auto it = reserved_.upper_bound(range.begin);
  if (it == reserved_.begin()) return false;
  --it;
  return range.end() <= it->first + it->second;
}

void SimMemory::end(DriverCall call, std::uint64_t serial, AddrRange range, HandleId handle) {
  if (options_.check_hazards) history_.add({call, serial, range, handle});
}

}  // namespace gpumemx
