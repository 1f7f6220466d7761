// SPDX-License-Identifier: BSD-3-Clause
//
// Random work: blocks of random sizes on some streams, each written when it comes and read when it
// goes, freed while that is still queued. Every kernel may lag; the host gets up to `ahead` ahead
// of a stream, then lets it catch up while the others lag. One thread.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "cuda_lab.hpp"

namespace gpumemx {

struct ChurnOptions {
  Bytes least{4u << 10};
  Bytes largest{256u << 20};
  Bytes most_live{3ull << 30};
  double lagging = 0.03;  // share of the kernels that spin, for 1 ms to ...
  microseconds longest{20'000};
  microseconds ahead{40'000};
  double shared = 0.1;  // share of the blocks that are also read on another stream
  int phase = 250;      // steps until most requests go to another stream
};

class Churn {
 public:
  Churn(CudaLab& lab, DeviceAllocator& allocator, std::vector<StreamInfo> streams,
        std::uint32_t seed, ChurnOptions options = {})
      : lab_(lab),
        allocator_(allocator),
        streams_(std::move(streams)),
        queued_(streams_.size()),
        options_(options),
        random_(seed),
        next_seed_(seed * 0x10001u + 1) {}
  Churn(const Churn&) = delete;
  Churn& operator=(const Churn&) = delete;

  void run(int steps) {
    for (int i = 0; i < steps; ++i) step();
  }
  void step() {
    ++steps_;
    const Bytes size = random_size();
    while (!live_.empty() && (live_bytes_ + size > options_.most_live || chance(0.25))) free_one();
    const std::size_t favourite =
        static_cast<std::size_t>(steps_ / options_.phase) % streams_.size();
    const std::size_t at = chance(0.8) ? favourite : below(streams_.size());
    const AllocResult got = allocator_.allocate({size, streams_[at], kDefaultPool, 0, nullptr});
    if (!got.ok()) {
      ADD_FAILURE() << got.failure->text();
      return;
    }
    ++blocks_;
    const Block block{{got.address, {size.n / 4 * 4}}, at, next_seed_++};
    live_bytes_ += size;
    lab_.fill(streams_[at].ref, block.range, block.seed, lag(at, size));
    live_.push_back(block);
  }
  void free_all() {
    while (!live_.empty()) free_one();
  }
  int blocks() const { return blocks_; }

 private:
  struct Block {
    AddrRange range;
    std::size_t stream;
    std::uint32_t seed;
  };

  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(random_) < p; }
  std::size_t below(std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random_);
  }
  // As many between 4 and 8 KiB as between 128 and 256 MiB; some whole pages, as weights are.
  Bytes random_size() {
    const double low = std::log(static_cast<double>(options_.least.n));
    const double high = std::log(static_cast<double>(options_.largest.n));
    const auto n =
        static_cast<std::uint64_t>(std::exp(std::uniform_real_distribution<>(low, high)(random_)));
    const Bytes size = chance(0.25) ? round_up({n}, 2_MiB) : Bytes{n};
    return std::min(size, options_.largest);
  }
  microseconds lag(std::size_t stream, Bytes size) {
    microseconds lag{};
    if (chance(options_.lagging)) {
      lag = microseconds(1000 + static_cast<std::int64_t>(below(
                                    static_cast<std::size_t>(options_.longest.count() - 999))));
    }
    microseconds& queued = queued_[stream];
    queued += lag + microseconds(static_cast<std::int64_t>(size.n >> 20) + 3);
    if (queued > options_.ahead) {
      lab_.synchronize(streams_[stream].ref);
      queued = {};
    }
    return lag;
  }
  void free_one() {
    const std::size_t at = below(live_.size());
    const Block block = live_[at];
    live_[at] = live_.back();
    live_.pop_back();
    live_bytes_ -= block.range.size;
    const StreamInfo& own = streams_[block.stream];
    lab_.check(own.ref, block.range, block.seed, lag(block.stream, block.range.size));
    if (streams_.size() > 1 && chance(options_.shared)) {
      const std::size_t other = below(streams_.size());
      if (other != block.stream) {
        lab_.order(own.ref, streams_[other].ref);
        lab_.check(streams_[other].ref, block.range, block.seed, lag(other, block.range.size));
        EXPECT_TRUE(allocator_.record_stream(block.range.begin, streams_[other]));
      }
    }
    allocator_.free(block.range.begin);
  }

  CudaLab& lab_;
  DeviceAllocator& allocator_;
  const std::vector<StreamInfo> streams_;
  std::vector<microseconds> queued_;
  const ChurnOptions options_;
  std::mt19937 random_;
  std::uint32_t next_seed_;
  std::vector<Block> live_;
  Bytes live_bytes_;
  int steps_ = 0;
  int blocks_ = 0;
};

}  // namespace gpumemx
