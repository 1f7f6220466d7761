// SPDX-License-Identifier: BSD-3-Clause
//
// Random programs against a model (support/programs.hpp says what they are made of,
// support/program_runner.hpp what must hold). Built twice: as random_programs on the library, and
// as planted_faults on a core with faults in it (core/planted.hpp), each of which must be caught.
//
//   GPUMEMX_SEEDS=1000 GPUMEMX_OPS=10000 random_programs    the long form
//   GPUMEMX_SEED=17 GPUMEMX_OPS=10000 random_programs       one program, shrunk when it fails
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/planted.hpp"
#include "support/program_runner.hpp"

namespace gpumemx {
namespace {

std::uint64_t setting(const char* name, std::uint64_t unset) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? unset : std::strtoull(text, nullptr, 10);
}

// A check of the core that fails aborts: then this is all that says which program it was.
volatile std::uint64_t current_seed = 0;
ProgramRunner* volatile current_runner = nullptr;

void say_where(int signal) {
  char text[160];
  const ProgramRunner* runner = current_runner;
  const int n = std::snprintf(
      text, sizeof text, "%s in the program of GPUMEMX_SEED=%llu, at operation %zu\n",
      signal == SIGABRT ? "aborted" : "crashed", static_cast<unsigned long long>(current_seed),
      runner == nullptr ? 0 : runner->position());
  if (n > 0) (void)!write(STDERR_FILENO, text, static_cast<std::size_t>(n));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void say_where_it_dies() {
  for (const int signal : {SIGABRT, SIGSEGV}) std::signal(signal, say_where);
}

std::optional<Broken> run(const Program& program, bool thorough = false) {
  ProgramRunner runner(program, thorough);
  current_runner = &runner;
  auto broken = runner.run();
  current_runner = nullptr;
  return broken;
}

#ifndef GPUMEMX_PLANTED_FAULTS

// Without the operations that the failure does not need, as far as that is found in `seconds`. What
// fails must begin with the same words, or another failure would be shrunk.
Program shrink(Program program, const Broken& broken, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  program.ops.resize(std::min(program.ops.size(), broken.op + 1));
  const std::string words = broken.what.substr(0, 12);
  for (std::size_t chunk = program.ops.size() / 2; chunk > 0; chunk /= 2) {
    for (std::size_t at = 0; at < program.ops.size() && Clock::now() < end;) {
      Program shorter = program;
      const auto from = shorter.ops.begin() + static_cast<std::ptrdiff_t>(at);
      shorter.ops.erase(
          from, from + static_cast<std::ptrdiff_t>(std::min(chunk, shorter.ops.size() - at)));
      const auto again = run(shorter, shorter.ops.size() < 400);
      if (again && again->what.substr(0, words.size()) == words) {
        program = std::move(shorter);
      } else {
        at += chunk;
      }
    }
  }
  return program;
}

std::string trailing(const Program& program, std::size_t upto, std::size_t count) {
  std::string text;
  const std::size_t end = std::min(program.ops.size(), upto + 1);
  for (std::size_t i = end - std::min(end, count); i < end; ++i) {
    text += "  " + std::to_string(i) + ": " + to_text(program.ops[i]) + "\n";
  }
  return text;
}

std::string report(const Program& program, const Broken& broken) {
  std::string text = "GPUMEMX_SEED=" + std::to_string(program.seed) +
                     " GPUMEMX_OPS=" + std::to_string(program.ops.size()) + ", operation " +
                     std::to_string(broken.op) + ": " + broken.what + "\nThe last operations:\n" +
                     trailing(program, broken.op, 20);
  const Program small = shrink(program, broken, 10);
  if (const auto again = run(small, true)) {
    text += "Shrunk to " + std::to_string(small.ops.size()) + " operations: " + again->what + "\n" +
            trailing(small, small.ops.size(), 60);
  }
  return text;
}

struct PathRow {
  const char* name;
  std::uint64_t PathCounts::* count;
};
constexpr PathRow kPaths[] = {
    {"hits", &PathCounts::hits},
    {"front_hits", &PathCounts::front_hits},
    {"misses", &PathCounts::misses},
    {"holes", &PathCounts::holes},
    {"created", &PathCounts::created},
    {"harvested_own", &PathCounts::harvested_own},
    {"harvested_other", &PathCounts::harvested_other},
    {"harvested_loose", &PathCounts::harvested_loose},
    {"alias_switches", &PathCounts::alias_switches},
    {"repointed", &PathCounts::repointed},
    {"recut", &PathCounts::recut},
    {"late_retired", &PathCounts::late_retired},
    {"waits", &PathCounts::waits},
    {"rollbacks", &PathCounts::rollbacks},
    {"private_blocks", &PathCounts::private_blocks},
    {"capture_blocks", &PathCounts::capture_blocks},
    {"plain_segments", &PathCounts::plain_segments},
    {"aliases_dropped", &PathCounts::aliases_dropped},
    {"fences", &PathCounts::fences},
};
constexpr std::uint64_t kLeastEach = 10'000;

TEST(RandomPrograms, FindNothingWrong) {
  const std::uint64_t one = setting("GPUMEMX_SEED", 0);
  const std::uint64_t first = one != 0 ? one : 1;
  const std::uint64_t seeds = one != 0 ? 1 : setting("GPUMEMX_SEEDS", 30);
  const std::uint64_t ops = setting("GPUMEMX_OPS", 2000);
  say_where_it_dies();

  const auto began = std::chrono::steady_clock::now();
  std::uint64_t counts[std::size(kPaths)] = {}, ooms = 0, done = 0, failures = 0;
  for (std::uint64_t seed = first; seed < first + seeds && failures < 3; ++seed) {
    current_seed = seed;
    const Program program = make_program(seed, static_cast<std::size_t>(ops));
    ProgramRunner runner(program, /*thorough=*/one != 0);
    current_runner = &runner;
    const auto broken = runner.run();
    current_runner = nullptr;
    if (broken) {
      ++failures;
      ADD_FAILURE() << report(program, *broken);
      continue;
    }
    for (std::size_t i = 0; i < std::size(kPaths); ++i)
      counts[i] += runner.paths().*kPaths[i].count;
    ooms += runner.ooms();
    done += program.ops.size();
  }
  for (const int signal : {SIGABRT, SIGSEGV}) std::signal(signal, SIG_DFL);

  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::printf("%llu programs of %llu operations in %.1f s (%.0f operations a second)\n",
              static_cast<unsigned long long>(seeds), static_cast<unsigned long long>(ops),
              took.count(), static_cast<double>(done) / took.count());
  for (std::size_t i = 0; i < std::size(kPaths); ++i) {
    std::printf("  %-16s %12llu\n", kPaths[i].name, static_cast<unsigned long long>(counts[i]));
  }
  std::printf("  %-16s %12llu\n", "OOMs", static_cast<unsigned long long>(ooms));
  if (seeds * ops < 10'000'000) return;
  for (std::size_t i = 0; i < std::size(kPaths); ++i) {
    EXPECT_GE(counts[i], kLeastEach) << kPaths[i].name << " is hardly tried";
  }
  EXPECT_GE(ooms, kLeastEach) << "running out of memory is hardly tried";
}

// Programs that found something once, and what. They say nothing any more when what a scene is made of
// has changed.
TEST(RandomPrograms, ThatFoundSomethingOnce) {
  struct Found {
    std::uint64_t seed;
    std::uint64_t scenes;  // how many there were
  };
  for (const auto& [seed, scenes] : {
           Found{2955, 9},  // a device of few mappings: a request was tried again for ever
       }) {
    const Program program = make_program(seed, 10'000, scenes);
    ProgramRunner runner(program, /*thorough=*/false);
    const auto broken = runner.run();
    if (broken) ADD_FAILURE() << report(program, *broken);
  }
}

#else

struct PlantedFault {
  Fault fault;
  const char* name;
};
constexpr PlantedFault kFaults[] = {
    {Fault::kNone, "none"},
    {Fault::kEventSkipped, "event skipped"},
    {Fault::kEpochKeptOpen, "epoch kept open"},
    {Fault::kRepointEarly, "address re-pointed early"},
    {Fault::kPendingReused, "pending block reused"},
    {Fault::kHandleIdleWhileBusy, "handle idle while busy"},
    {Fault::kOtherStreamUnchecked, "other stream unchecked"},
    {Fault::kPrivateMerelyOrdered, "private pool merely ordered"},
    {Fault::kSwitchBusyAlias, "busy alias switched to"},
    {Fault::kRollbackForgets, "rollback forgets"},
    {Fault::kReleaseEarly, "released early"},
    {Fault::kCaptureNotRelaxed, "capture mode not relaxed"},
    {Fault::kPrivateHarvested, "private pool harvested"},
    {Fault::kPoolDissolvedEarly, "pool dissolved early"},
    {Fault::kLockNotTaken, "lock not taken"},
    {Fault::kRemainderOverlaps, "remainder overlaps"},
};
constexpr std::uint64_t kMostSeeds = 100;

// Runs seeds until something is found, and says what, in a process of its own: it may abort, or run
// in circles in damaged lists. Returns the text, empty when nothing was found.
std::string hunt(const PlantedFault& fault, std::uint64_t seeds, std::size_t ops) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) return "";
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_ends[1], STDERR_FILENO);  // what an abort says comes back too
    planted_fault = fault.fault;
    say_where_it_dies();
    alarm(600);
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
      current_seed = seed;
      const Program program = make_program(seed, ops);
      if (const auto broken = run(program)) {
        std::fprintf(stderr, "seed %llu, operation %zu: %s\n",
                     static_cast<unsigned long long>(seed), broken->op, broken->what.c_str());
        break;
      }
    }
    std::fflush(stderr);
    _exit(0);
  }
  close(pipe_ends[1]);
  std::string said;
  char buffer[512];
  for (ssize_t n; (n = read(pipe_ends[0], buffer, sizeof buffer)) > 0;) {
    said.append(buffer, static_cast<std::size_t>(n));
  }
  close(pipe_ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (said.empty() && WIFSIGNALED(status))
    said = std::string("died: ") + strsignal(WTERMSIG(status)) + "\n";
  return said;
}

TEST(PlantedFaults, AreAllCaught) {
  const std::size_t ops = static_cast<std::size_t>(setting("GPUMEMX_OPS", 2000));
  const std::uint64_t seeds = std::min(setting("GPUMEMX_SEEDS", kMostSeeds), kMostSeeds);
  const std::uint64_t only = setting("GPUMEMX_FAULT", ~0ull);  // its number
  for (const PlantedFault& fault : kFaults) {
    if (only != ~0ull && static_cast<std::uint64_t>(fault.fault) != only) continue;
    const bool is_planted = fault.fault != Fault::kNone;
    const std::string said = hunt(fault, is_planted ? kMostSeeds : seeds, ops);
    std::printf("%-28s %s", fault.name, said.empty() ? "nothing found\n" : said.c_str());
    std::fflush(stdout);
    if (is_planted) {
      EXPECT_NE(said, "") << "not caught in " << kMostSeeds << " seeds: " << fault.name;
    } else {
      EXPECT_EQ(said, "") << "found without any fault";
    }
  }
}

#endif

}  // namespace
}  // namespace gpumemx
