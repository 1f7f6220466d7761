// SPDX-License-Identifier: BSD-3-Clause
//
// Recorded snapshots, cut and with bytes changed at random: reading one and all that is made of it
// ends in a result or in one clear sentence. Wants the sanitizers, which see what a lucky run hides.
//
//   GPUMEMX_ROUNDS  damaged files (default 2,000); GPUMEMX_SEED the first one's (default 1)
//   GPUMEMX_FILES   further snapshots to damage, separated by ':'. Large ones come rarely: a file's
//                   share of the rounds is by the inverse of its size
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "replay/analysis.hpp"
#include "replay/recorded_run.hpp"

namespace gpumemx {
namespace {

std::uint64_t setting(const char* name, std::uint64_t unset) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? unset : std::strtoull(text, nullptr, 10);
}

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> sources() {
  std::vector<std::string> files{
      content(std::string(GPUMEMX_SOURCE_DIR) + "/tests/data/gnn_sampling.pickle")};
  const char* more = std::getenv("GPUMEMX_FILES");
  std::string paths = more == nullptr ? "" : more;
  while (!paths.empty()) {
    const std::size_t end = std::min(paths.find(':'), paths.size());
    files.push_back(content(paths.substr(0, end)));
    paths.erase(0, end + 1);
  }
  return files;
}

// A fifth of the files is cut. The others have one change, or up to eight, of one to four bytes each: a
// bit, any byte, a byte of the file's own from elsewhere, all ones (the largest length), or a piece
// taken out. A tenth has both.
std::string damaged(std::string bytes, std::mt19937_64& random) {
  const auto below = [&](std::uint64_t n) { return n == 0 ? 0 : random() % n; };
  const std::uint64_t kind = below(10);
  if (kind > 1) {
    for (std::uint64_t changes = below(2) == 0 ? 1 : 1 + below(8); changes > 0; --changes) {
      const std::uint64_t at = below(bytes.size());
      const std::uint64_t how = below(5), length = below(2) == 0 ? 1 : 1 + below(4);
      if (how == 4) {
        bytes.erase(at, length);
        continue;
      }
      for (std::uint64_t i = at; i < std::min<std::uint64_t>(at + length, bytes.size()); ++i) {
        char& byte = bytes[i];
        switch (how) {
          case 0: byte = static_cast<char>(byte ^ (1 << below(8))); break;
          case 1: byte = static_cast<char>(below(256)); break;
          case 2: byte = bytes[below(bytes.size())]; break;
          default: byte = '\xff'; break;
        }
      }
    }
  }
  if (kind < 3) bytes.resize(below(bytes.size() + 1));
  return bytes;
}

// How far it came: what is counted at the end.
std::string outcome(const std::string& bytes) {
  PickleInput input(std::as_bytes(std::span(bytes)));
  const auto clear = [](const Error& error) {
    EXPECT_EQ(error.code, Errc::kInvalidArgument);
    EXPECT_GE(error.where.size(), 20u);
    EXPECT_LT(error.where.size(), 400u);
    EXPECT_EQ(error.where.find('\n'), std::string::npos);
    return error.where.substr(0, error.where.find_first_of(":[0123456789"));
  };
  const auto snapshot = read_snapshot(input);
  if (!snapshot.ok()) return "refused: " + clear(snapshot.error());
  const auto analysis = analyze(snapshot.value());
  if (!analysis.ok()) return "not analyzed: " + clear(analysis.error());
  for (const DeviceAnalysis& device : analysis.value().devices) {
    EXPECT_LE(device.series.size(), DeviceAnalysis::kMaxPoints);
    std::uint64_t alive = 0;
    for (const AliveGroup& group : device.by_site) alive += group.bytes;
    EXPECT_EQ(alive, device.peak_live);
  }
  const auto traces = snapshot_traces(snapshot.value());
  if (!traces.ok()) return "no trace: " + clear(traces.error());
  for (const SnapshotTrace& trace : traces.value()) {
    EXPECT_FALSE(validate_trace(trace.view()).has_value());
  }
  return "taken";
}

TEST(DamagedSnapshots, EndInAResultOrInAClearSentence) {
  const std::uint64_t rounds = setting("GPUMEMX_ROUNDS", 2000);
  const std::uint64_t first = setting("GPUMEMX_SEED", 1);
  const std::vector<std::string> files = sources();
  ASSERT_EQ(outcome(files.front()), "taken");
  std::size_t smallest = files.front().size();
  for (const std::string& file : files) {
    ASSERT_FALSE(file.empty());
    smallest = std::min(smallest, file.size());
  }
  std::map<std::string, std::uint64_t> outcomes;
  std::vector<std::uint64_t> used(files.size());
  for (std::uint64_t seed = first; seed < first + rounds; ++seed) {
    std::mt19937_64 random(seed);
    std::size_t file = random() % files.size();
    while (random() % files[file].size() >= smallest) file = random() % files.size();
    ++used[file];
    ++outcomes[outcome(damaged(files[file], random))];
    if (HasFailure())
      FAIL() << "seed " << seed << " (GPUMEMX_SEED=" << seed << " GPUMEMX_ROUNDS=1)";
  }
  for (const auto& [name, count] : outcomes) {
    std::printf("%8llu  %s\n", static_cast<unsigned long long>(count), name.c_str());
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    std::printf("%8llu  of file %zu\n", static_cast<unsigned long long>(used[i]), i);
  }
}

}  // namespace
}  // namespace gpumemx
