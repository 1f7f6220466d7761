// SPDX-License-Identifier: BSD-3-Clause
//
// Random programs: what a seed means. A program is a list of operations with plain numbers, made
// before anything runs, so that it can be printed, and still runs when any of them are left out: a
// number picks among what exists at that moment. program_runner.hpp carries programs out.
//
// Most programs are made of scenes that look like real ones (training steps, graphs, two streams
// that hand memory to each other, a device that gets full), for it is repetition with small changes
// that makes memory move; a few operations of any kind are strewn in everywhere.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/options.hpp"
#include "driver/device_driver.hpp"
#include "driver/sim/sim_options.hpp"

namespace gpumemx {

// The engine is specified by the standard, the standard's distributions are not.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  std::uint64_t next() { return engine_(); }
  std::uint64_t below(std::uint64_t n) { return engine_() % n; }  // REQUIRES: n > 0
  std::uint64_t from(std::uint64_t least, std::uint64_t most) {
    return least + below(most - least + 1);
  }
  bool percent(std::uint64_t chance) { return below(100) < chance; }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return *(choices.begin() + static_cast<std::ptrdiff_t>(below(choices.size())));
  }

 private:
  std::mt19937_64 engine_;
};

struct Op {
  enum Kind : std::uint8_t {
    kAlloc,          // a bytes on stream b; c: in a pool or not, may it exceed most_live
    kFree,           // a: newest, oldest, or b-th; c: what is checked before
    kUse,            // block a is read or written on its stream, as c says
    kCross,          // block a is used on stream b, in one of the allowed ways: c
    kFreeElsewhere,  // another thread frees block a while this one is inside allocate(b bytes)
    kComplete,       // a items of stream b
    kCompleteAll,
    kAdvance,       // the clock, by a us
    kTrim,          // a: how
    kMaintain,      // a: how many calls' worth, b: whether memory is marked as returning first
    kBeginCapture,  // on stream a (of any kind), into pool b (old or new)
    kGraphAlloc,    // a bytes in capture b
    kGraphFree,     // block a of capture b
    kGraphUse,
    kEndCapture,  // capture a
    kReplay,      // graph a on permanent stream b
    kDropGraphs,  // pool a: its graphs are destroyed, it is released; outputs freed before or after
    kCreatePool,  // a: plain, whole, of a third party, for use when out of memory, or neither
    kReleasePool,
    kCheckpoint,  // pool a: what is live there is remembered
    kRestore,     // pool a
    kCreateStream,
    kDestroyStream,
    kFailNth,    // driver call a, the b-th from now
    kBreakMaps,  // mapping fails from now on; a: for good
    kMendMaps,
    kOccupy,  // others take a percent of the device
    kCap,     // a percent of the device
    kResetPeaks,
    kNonsense,  // a request of a bytes, which nobody can serve
    kHistory,
    kCheck,  // everything that can be checked
  };
  Kind kind;
  std::uint64_t a = 0, b = 0, c = 0;
};

inline std::string to_text(const Op& op) {
  static constexpr const char* kNames[] = {
      "alloc",        "free",       "use",         "cross",         "free_elsewhere", "complete",
      "complete_all", "advance",    "trim",        "maintain",      "begin_capture",  "graph_alloc",
      "graph_free",   "graph_use",  "end_capture", "replay",        "drop_graphs",    "create_pool",
      "release_pool", "checkpoint", "restore",     "create_stream", "destroy_stream", "fail_nth",
      "break_maps",   "mend_maps",  "occupy",      "cap",           "reset_peaks",    "nonsense",
      "history",      "check"};
  return std::string(kNames[op.kind]) + " {" + std::to_string(op.a) + ", " + std::to_string(op.b) +
         ", " + std::to_string(op.c) + "}";
}

struct Program {
  std::uint64_t seed = 0;
  SimOptions device;
  Options options;
  bool lags = false;          // work completes by the clock, not when the program says so
  std::uint64_t streams = 2;  // permanent ones
  Bytes most_live;            // allocations free others first when they would go beyond
  std::vector<Op> ops;
};

// --- generation

class ProgramMaker {
 public:
  // Of the scenes the first `scenes`: a program that was found when there were fewer stays the same.
  ProgramMaker(std::uint64_t seed, std::size_t ops, std::uint64_t scenes)
      : random_(seed), count_(ops), scenes_(scenes) {
    program_.seed = seed;
    choose_device();
    choose_options();
    choose_habits();
  }

  Program make() {
    program_.ops.reserve(count_ + 64);
    while (program_.ops.size() < count_) {
      switch (random_.below(scenes_)) {
        case 0:
        case 1:
        case 2: steps(); break;
        case 3: churn(); break;
        case 4: exchange(); break;
        case 5: graphs(); break;
        case 6: pressure(); break;
        case 7: alternate(); break;
        case 8: trees(); break;
        case 9: pairs(); break;
      }
    }
    program_.ops.resize(count_);
    return std::move(program_);
  }

 private:
  void choose_device() {
    program_.device.capacity = Bytes{random_.from(48, 256) * 2} * (1u << 20);
    if (random_.percent(15)) program_.device.capacity += Bytes{random_.below(4096) * 512};
    program_.device.virtual_memory = !random_.percent(3);
    if (random_.percent(4)) program_.device.max_mappings = random_.from(16, 200);
    program_.lags = random_.percent(25);
    program_.streams = random_.from(2, 5);
    program_.most_live = Bytes{program_.device.capacity.n / 100 * random_.from(40, 97)};
  }

  void choose_options() {
    Options& o = program_.options;
    const auto mib = [](std::uint64_t n) { return Bytes{n << 20}; };
    if (random_.percent(70)) {  // handles as small as the device
      o.rest_handle = mib(random_.one_of({2u, 4u, 8u}));
      o.rest_handle_max = std::max(o.rest_handle, mib(random_.one_of({4u, 8u, 16u, 32u})));
      o.big_handle = mib(random_.one_of({2u, 4u, 8u}));
      o.big_handle_max = std::max(o.big_handle, mib(random_.one_of({8u, 16u, 64u})));
      o.tight_handle = mib(random_.one_of({2u, 4u, 16u}));
      o.small_handle = mib(random_.one_of({2u, 2u, 4u}));
    }
    if (random_.percent(30)) o.small_limit = Bytes{random_.one_of({512u, 65536u, 2u << 20})};
    if (random_.percent(30)) o.big_from = mib(random_.from(4, 64));
    if (random_.percent(30)) o.hit_scan = static_cast<int>(random_.from(1, 20));
    if (random_.percent(50)) o.hit_waste = Bytes{random_.below(9 << 20)};
    if (random_.percent(30)) o.miss_runs = static_cast<int>(random_.below(33));
    if (random_.percent(30)) o.miss_extents = static_cast<int>(random_.below(17));
    if (random_.percent(30)) o.miss_tries = static_cast<int>(random_.from(1, 10));
    if (random_.percent(60)) o.price = static_cast<double>(random_.below(20));
    if (random_.percent(60)) o.price_pages = static_cast<double>(random_.below(8));
    if (random_.percent(30)) o.overhang = mib(random_.below(17));
    o.max_aliases = static_cast<int>(random_.from(1, 8));
    if (random_.percent(40)) o.slack = static_cast<double>(random_.below(30)) / 100;
    // With it a small program grows where it would move memory.
    o.cushion = random_.percent(30) ? static_cast<double>(random_.below(30)) / 100 : 0;
    o.cushion_until = mib(random_.from(8, 200));  // a quarter of the device at most has one
    if (random_.percent(40)) o.tight_from = static_cast<double>(random_.from(40, 100)) / 100;
    if (random_.percent(70)) o.fence_frees = static_cast<std::uint32_t>(random_.from(1, 64));
    if (random_.percent(70)) o.fence_bytes = mib(random_.from(1, 64));
    if (random_.percent(30)) o.max_fences = static_cast<std::uint32_t>(random_.from(1, 16));
    if (random_.percent(15))
      o.cap = Bytes{program_.device.capacity.n / 100 * random_.from(50, 100)};
    if (random_.percent(10)) o.max_mappings = random_.from(16, 256);
    o.plain = random_.percent(4);
    o.background = random_.percent(40);
    o.recut = !random_.percent(8);
  }

  void choose_habits() {
    strewn_ = random_.from(3, 15);
    has_graphs_ = random_.percent(70);
    has_pools_ = random_.percent(60);
    has_temporary_ = random_.percent(60);
    has_failures_ = random_.percent(60);
    has_others_ = random_.percent(40);
    breaks_maps_ = random_.percent(4);
    completes_ = random_.from(2, 25);
    new_palette();
  }

  // --- sizes

  Bytes size() {
    const std::uint64_t most = program_.device.capacity.n / 4;
    std::uint64_t n = 1;
    switch (random_.below(20)) {
      case 0:
      case 1:
      case 2: n = random_.from(1, 4096); break;
      case 3:
      case 4:
      case 5: n = random_.from(4096, 1 << 20); break;
      case 6:
      case 7:
      case 8:
      case 9:
      case 10:
      case 11: n = random_.from(1 << 20, 6 << 20); break;
      case 12:
      case 13:
      case 14: n = random_.from(6 << 20, 24 << 20); break;
      case 15:
      case 16:
      case 17: n = random_.from(1, 12) << 21; break;
      case 18: n = random_.from(12 << 20, 100 << 20); break;
      case 19: n = random_.from(1, 100) << 20; break;
    }
    return {std::min(n, std::max<std::uint64_t>(most, 1))};
  }

  void new_palette() {
    palette_.resize(random_.from(3, 20));
    for (Bytes& s : palette_) s = size();
  }
  // What a new batch or sequence length does: all sizes change a little.
  void change_palette() {
    const std::uint64_t up = random_.from(50, 150);
    for (Bytes& s : palette_) s = {std::max<std::uint64_t>(s.n / 100 * up, 1)};
    if (random_.percent(30)) new_palette();
  }

  // --- operations

  void add(Op::Kind kind, std::uint64_t a = 0, std::uint64_t b = 0, std::uint64_t c = 0) {
    program_.ops.push_back({kind, a, b, c});
    // Work goes on by itself.
    if (random_.percent(completes_)) complete();
    if (random_.percent(strewn_)) program_.ops.push_back(any());
  }
  void complete() {
    if (program_.lags) {
      program_.ops.push_back({Op::kAdvance, random_.below(400)});
    } else {
      program_.ops.push_back({Op::kComplete, random_.from(1, 12), random_.next(), random_.next()});
    }
  }
  void alloc(Bytes size, std::uint64_t stream) {
    add(Op::kAlloc, size.n, stream,
        has_pools_ && random_.percent(6) ? random_.next() | 1 : random_.next() & ~1ull);
  }
  void free(std::uint64_t order) { add(Op::kFree, order, random_.next(), random_.next()); }

  Op any() {
    const auto r = [&] { return random_.next(); };
    switch (random_.below(32)) {
      case 0: return {Op::kAlloc, size().n, r(), r() & ~1ull};
      case 1: return {Op::kFree, r(), r(), r()};
      case 2:
      case 3: return {Op::kUse, r(), r(), r()};
      case 4:
      case 5:
      case 6: return {Op::kCross, r(), r(), r()};
      case 7: return {Op::kComplete, random_.from(1, 40), r(), r()};
      case 8:
        if (random_.percent(20)) return {Op::kCompleteAll};
        return {Op::kComplete, random_.from(1, 40), r(), r()};
      case 9: return {Op::kAdvance, random_.below(1500)};
      case 10:
        if (random_.percent(25)) return {Op::kTrim, r(), r(), r()};
        return {Op::kMaintain, r(), r()};
      case 11:
      case 12: return {Op::kMaintain, r(), r()};
      case 13:
        if (has_graphs_) return {Op::kBeginCapture, r(), r(), r()};
        return {Op::kUse, r(), r(), r()};
      case 14:
      case 15:
      case 16: return {Op::kGraphAlloc, size().n, r(), r()};
      case 17: return {Op::kGraphFree, r(), r(), r()};
      case 18: return {Op::kEndCapture, r()};
      case 19:
      case 20: return {Op::kReplay, r(), r(), r()};
      case 21:
        if (random_.percent(40)) return {Op::kDropGraphs, r(), r(), r()};
        return {Op::kReplay, r(), r(), r()};
      case 22:
        if (!has_pools_) return {Op::kUse, r(), r(), r()};
        if (random_.percent(40)) return {Op::kCreatePool, r()};
        if (random_.percent(30)) return {Op::kCheckpoint, r()};
        if (random_.percent(45)) return {Op::kRestore, r()};
        return {Op::kReleasePool, r(), r()};
      case 23:
      case 24:
        if (!has_temporary_) return {Op::kUse, r(), r(), r()};
        if (random_.percent(50)) return {Op::kCreateStream};
        return {Op::kDestroyStream, r()};
      case 25:
      case 26:
        if (!has_failures_) return {Op::kUse, r(), r(), r()};
        return {Op::kFailNth, r(), random_.from(1, 6)};
      case 27:
        if (breaks_maps_ && random_.percent(30)) return {Op::kBreakMaps, r()};
        return {Op::kMendMaps};
      case 28:
        if (!has_others_) return {Op::kUse, r(), r(), r()};
        return {Op::kOccupy, random_.percent(40) ? 0 : random_.below(35)};
      case 29:
        if (!has_others_ || random_.percent(70)) return {Op::kUse, r(), r(), r()};
        return {Op::kCap, random_.percent(50) ? 1000 : random_.from(40, 110)};
      case 30:
        if (random_.percent(20)) return {Op::kResetPeaks, r()};
        if (random_.percent(10)) return {Op::kFreeElsewhere, r(), size().n, r()};
        return {Op::kHistory, random_.percent(50) ? 0 : random_.from(1, 100)};
      default:
        if (random_.percent(30)) return {Op::kNonsense, r() | (1ull << 50)};
        if (random_.percent(20)) return {Op::kCheck};
        return {Op::kUse, r(), r(), r()};
    }
  }

  // --- scenes

  std::uint64_t main_stream() {
    if (random_.percent(20)) main_ = random_.next();
    return random_.percent(90) ? main_ : random_.next();
  }

  // Trees of graphs: a pool goes back to what it was, and another branch is taken.
  void trees() {
    if (!has_pools_) return churn();
    add(Op::kCreatePool, random_.percent(60) ? 1 : random_.next());
    const std::uint64_t branches = random_.from(2, 6);
    for (std::uint64_t branch = 0; branch < branches; ++branch) {
      for (std::uint64_t n = random_.from(1, 6); n > 0; --n) {
        add(Op::kAlloc, size().n / 2 + 1, random_.next(), random_.next() | 1);
        if (random_.percent(30)) free(random_.next());
      }
      add(random_.percent(60) ? Op::kCheckpoint : Op::kRestore, random_.next());
      if (random_.percent(30)) add(Op::kCross, random_.next(), random_.next(), random_.next());
      for (std::uint64_t n = random_.from(0, 4); n > 0; --n) free(random_.next());
      if (random_.percent(60)) add(Op::kRestore, random_.next());
    }
    if (random_.percent(70)) add(Op::kReleasePool, random_.next(), random_.next());
  }

  // Training: activations are made forwards and freed backwards, with short-lived ones between.
  void steps() {
    if (random_.percent(60)) change_palette();
    const std::uint64_t steps = random_.from(2, 6);
    for (std::uint64_t step = 0; step < steps; ++step) {
      const std::uint64_t stream = main_stream();
      std::size_t live = 0;
      for (const Bytes s : palette_) {
        alloc(s, stream);
        ++live;
        if (random_.percent(30)) {
          alloc(size(), stream);
          free(0);
        }
      }
      for (std::size_t i = palette_.size(); i-- > 0 && live > 0;) {
        if (random_.percent(40)) {
          alloc(palette_[i], stream);
          if (random_.percent(70)) free(0);
        }
        free(0);
        --live;
      }
      if (random_.percent(30)) add(Op::kCompleteAll);
      if (random_.percent(30)) change_palette();
      if (program_.ops.size() > count_) return;
    }
  }

  void churn() {
    const std::uint64_t n = random_.from(50, 200);
    for (std::uint64_t i = 0; i < n; ++i) {
      if (random_.percent(45)) {
        alloc(random_.percent(60) ? palette_[random_.below(palette_.size())] : size(),
              random_.next());
      } else {
        free(2);
      }
      if (random_.percent(20)) program_.ops.push_back(any());
    }
  }

  // Producer and consumer on different streams; freed in the order of creation.
  void exchange() {
    const std::uint64_t one = random_.next(), two = random_.next(), n = random_.from(20, 80);
    for (std::uint64_t i = 0; i < n; ++i) {
      alloc(palette_[random_.below(palette_.size())], one);
      add(Op::kCross, ~0ull, two, random_.next());
      if (random_.percent(80)) free(random_.percent(70) ? 0 : 1);
    }
    if (random_.percent(50)) add(Op::kCompleteAll);
  }

  void graphs() {
    if (!has_graphs_) return churn();
    const std::uint64_t captures = random_.from(1, 3);
    for (std::uint64_t i = 0; i < captures; ++i) {
      add(Op::kBeginCapture, random_.next(), random_.next(), random_.next());
      const std::uint64_t n = random_.from(3, 25);
      for (std::uint64_t j = 0; j < n; ++j) {
        add(Op::kGraphAlloc,
            random_.percent(50) ? palette_[random_.below(palette_.size())].n : size().n, ~0ull,
            random_.next());
        if (random_.percent(60)) add(Op::kGraphFree, random_.next(), ~0ull, random_.next());
        if (random_.percent(20)) add(Op::kGraphUse, random_.next(), ~0ull, random_.next());
        if (random_.percent(20)) alloc(size(), random_.next());
        if (random_.percent(15)) free(2);
      }
      if (!random_.percent(10)) add(Op::kEndCapture, ~0ull);
      const std::uint64_t replays = random_.from(1, 20);
      for (std::uint64_t j = 0; j < replays; ++j) {
        add(Op::kReplay, random_.next(), random_.next(), random_.next());
        if (random_.percent(30)) alloc(palette_[random_.below(palette_.size())], main_stream());
        if (random_.percent(30)) free(2);
      }
      if (random_.percent(60)) {
        add(Op::kReplay, random_.next(), random_.next(), random_.next());
        add(Op::kDropGraphs, random_.next(), random_.next(), random_.next());
        change_palette();
        for (int j = 0; j < 6; ++j) alloc(size(), random_.next());
      }
    }
  }

  // The device gets full; then much is freed.
  void pressure() {
    const std::uint64_t stream = main_stream();
    const std::uint64_t n = random_.from(5, 40);
    for (std::uint64_t i = 0; i < n; ++i) {
      alloc(random_.percent(50) ? size() : Bytes{size().n * random_.from(1, 4)},
            random_.percent(70) ? stream : random_.next());
      if (random_.percent(25)) program_.ops.push_back({Op::kAlloc, size().n, stream, 0});
    }
    for (std::uint64_t i = 0; i < n * 2 / 3; ++i) free(2);
  }

  // Two shapes in turn, as buckets of sequence lengths are: old places fit again.
  void alternate() {
    std::vector<Bytes> one = palette_, two = palette_;
    for (Bytes& s : two) s = {std::max<std::uint64_t>(s.n / 4 * random_.from(2, 6), 1)};
    const std::uint64_t stream = main_stream(), rounds = random_.from(4, 12);
    for (std::uint64_t round = 0; round < rounds; ++round) {
      const auto& sizes = round % 2 == 0 ? one : two;
      for (const Bytes s : sizes) alloc(s, stream);
      for (std::size_t i = 0; i < sizes.size(); ++i) free(random_.percent(80) ? 0 : 1);
      if (program_.ops.size() > count_) return;
    }
  }

  // Small blocks of few sizes come and go on a stream or two, as the scalars of a loop do: what fronts
  // are for. Everything that sends requests the long way is ended first, and little is strewn in.
  void pairs() {
    const auto push = [&](Op::Kind kind, std::uint64_t a = 0, std::uint64_t b = 0) {
      program_.ops.push_back({kind, a, b, random_.next() & ~1ull});
    };
    push(Op::kHistory);
    for (int i = 0; i < 2; ++i) push(Op::kEndCapture);
    const std::uint64_t freed = random_.from(0, 12);
    for (std::uint64_t i = 0; i < freed; ++i) push(Op::kFree, 2, random_.next());
    push(Op::kCompleteAll);
    if (random_.percent(40)) push(Op::kTrim);

    std::vector<std::uint64_t> sizes(random_.from(1, 4));
    const std::uint64_t most = std::min<std::uint64_t>(program_.options.small_limit.n, 1u << 20);
    for (std::uint64_t& s : sizes) s = random_.from(1, random_.percent(70) ? most / 64 + 1 : most);
    const std::uint64_t streams[] = {main_stream(), random_.next()};
    const std::uint64_t alive = random_.percent(70) ? random_.from(1, 4) : random_.from(10, 70);
    const bool both = random_.percent(25);
    const std::uint64_t rounds = random_.from(10, 120) / alive + 1;
    for (std::uint64_t round = 0; round < rounds; ++round) {
      for (std::uint64_t i = 0; i < alive; ++i) {
        push(Op::kAlloc, sizes[i % sizes.size()], streams[both ? i % 2 : 0]);
        if (random_.percent(2)) program_.ops.push_back(any());
      }
      for (std::uint64_t i = 0; i < alive; ++i) push(Op::kFree, 0, random_.next());
      if (random_.percent(10)) complete();
    }
  }

  Random random_;
  std::size_t count_;
  std::uint64_t scenes_;
  Program program_;
  std::vector<Bytes> palette_;
  std::uint64_t strewn_ = 0, completes_ = 0, main_ = 0;
  bool has_graphs_ = false, has_pools_ = false, has_temporary_ = false, has_failures_ = false,
       has_others_ = false, breaks_maps_ = false;
};

inline constexpr std::uint64_t kScenes = 10;

inline Program make_program(std::uint64_t seed, std::size_t ops, std::uint64_t scenes = kScenes) {
  return ProgramMaker(seed, ops, scenes).make();
}

}  // namespace gpumemx
