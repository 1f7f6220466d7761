// SPDX-License-Identifier: BSD-3-Clause
//
// What a LibTorch program does with gpumemx, on the simulated device and on the real one (testbed.hpp).
// The tag says in which state the process is, and the build runs each tag in a process of its own:
//
//   [before]     gpumemx is not installed and CUDA has not started
//   [installed]  it is, with a cap of 1 GiB
//   [torch]      CUDA has started on torch's own allocator
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/version.hpp"
#include "cpp/testbed.hpp"
#include "replay/analysis.hpp"
#include "replay/snapshot.hpp"
#include "support/catch.hpp"

namespace gpumemx {
namespace {

using testbed::Block;
using testbed::kGiB;
using testbed::kMiB;

const Settings kOurs{{"cap", "1GiB"}};

// The text of the Error that `act` throws, or "" when it throws nothing or something else.
template <class Error, class Act>
std::string error_text(Act act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::uint64_t sum(const Released& r) {
  return r.released + r.live + r.held + r.pending + r.pools + r.kept;
}

class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
};

class TemporaryFile {
 public:
  TemporaryFile() {
    std::string pattern = (std::filesystem::temp_directory_path() / "gpumemx-XXXXXX").string();
    const int file = mkstemp(pattern.data());
    REQUIRE(file >= 0);
    close(file);
    path = pattern;
  }
  ~TemporaryFile() { std::filesystem::remove(path); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  std::string path;
};

// What `act` writes to stderr.
template <class Act>
std::string stderr_of(Act act) {
  const TemporaryFile file;
  std::fflush(stderr);
  const int kept = dup(STDERR_FILENO);
  REQUIRE(std::freopen(file.path.c_str(), "w", stderr) != nullptr);
  act();
  std::fflush(stderr);
  dup2(kept, STDERR_FILENO);
  close(kept);
  std::ifstream text(file.path);
  return {std::istreambuf_iterator<char>(text), {}};
}

// --- before

SCENARIO("Before CUDA has started all questions have an answer", "[before]") {
  REQUIRE_FALSE(is_installed());

  const MemoryInfo info = memory_info();
  CHECK(info.device == 0);
  CHECK(info.allocator == "none");
  CHECK(info.total + info.free + info.others + info.reserved + info.live == 0);
  CHECK_FALSE(info.device_known);
  CHECK_FALSE(info.cap.has_value());
  CHECK(memory_summary() == "GPU 0: CUDA has not started, nothing is reserved.");

  const Released released = clear_cache(kCurrentDevice, true);
  CHECK(sum(released) == 0);
  CHECK(released.text == "nothing to give back: nothing was allocated on this device");
  CHECK(sum(trim_to(kGiB, 1, true)) == 0);

  GPUMonitor monitor("start");
  monitor.end();
  CHECK(monitor.peak() == 0);
  CHECK(monitor.delta() == 0);
  CHECK_FALSE(monitor.exact());

  CHECK_FALSE(history_enabled());
  CHECK(contains(error_text<std::logic_error>([] { save_snapshot("/no/such/folder/none.pickle"); }),
                 "CUDA has not started"));
}

SCENARIO("Mistakes are named before anything is installed", "[before]") {
  CHECK(contains(error_text<SettingError>([] { install_allocator({{"cpa", "1GiB"}}); }),
                 "install_allocator(): there is no setting 'cpa'; the nearest name is 'cap'"));
  CHECK(contains(error_text<SettingError>([] { install_allocator({{"cap", "much"}}); }), "much"));
  {
    const Environment misspelled("GPUMEMX_CNOF", "cap:1GiB");
    CHECK(contains(error_text<SettingError>([] { install_allocator(); }), "GPUMEMX_CONF"));
  }
  {
    const Environment conf("GPUMEMX_CONF", "cap:-3");
    CHECK(contains(error_text<SettingError>([] { install_allocator(); }), "GPUMEMX_CONF: "));
    CHECK(contains(error_text<SettingError>([] { settings(); }), "GPUMEMX_CONF: "));
  }
  {
    const Environment unclear("GPUMEMX_DISABLE", "perhaps");
    CHECK(error_text<SettingError>([] { install_allocator(); }) ==
          "GPUMEMX_DISABLE: 'perhaps' is neither 1 nor 0");
  }
  CHECK_FALSE(is_installed());

  CHECK(contains(error_text<std::invalid_argument>([] { (void)on_memory_pressure(nullptr); }),
                 "the callback is empty"));
  CHECK(contains(error_text<std::invalid_argument>([] { enable_history({0, true}); }),
                 "max_entries is 0"));
  CHECK_FALSE(history_enabled());
}

SCENARIO("The kill switch keeps torch's own allocator", "[before]") {
  const Environment disabled("GPUMEMX_DISABLE", "1");
  install_allocator({{"cap", "1GiB"}});
  CHECK_FALSE(is_installed());
}

SCENARIO("Settings can be looked at before they are in force", "[before]") {
  const Environment conf("GPUMEMX_CONF", "cap:3GiB");
  bool found = false;
  for (const Setting& setting : settings()) {
    CHECK_FALSE(setting.note.empty());
    if (setting.key == "cap") {
      found = true;
      CHECK(setting.value == "3GiB");
      CHECK(setting.source == "GPUMEMX_CONF");
    } else {
      CHECK(setting.source == "default");
    }
  }
  CHECK(found);
}

SCENARIO("Settings take what C++ has", "[before]") {
  CHECK(SettingValue(true).text() == "true");
  CHECK(SettingValue(std::size_t{20} << 30).text() == "21474836480");
  CHECK(SettingValue(0.15).text() == "0.15");
  CHECK(SettingValue("20GiB").text() == "20GiB");
  Settings settings{{"cap", "1GiB"}};
  settings.set("background", false).set("slack", 0.5);
  REQUIRE(settings.values.size() == 3);
  CHECK(settings.values[1].first == "background");
  CHECK(settings.values[1].second.text() == "false");
  CHECK(settings.values[2].second.text() == "0.5");
  CHECK_FALSE(settings.late);
  CHECK(std::string(version()) == GPUMEMX_VERSION);
}

// --- installed

SCENARIO("gpumemx is installed once", "[installed]") {
  testbed::install(kOurs);
  CHECK(is_installed());
  CHECK_NOTHROW(install_allocator());
  CHECK_NOTHROW(install_allocator(kOurs));
  CHECK_NOTHROW(install_allocator({{"CAP", "1024 MiB"}}));
  const std::string text = error_text<InstallError>([] { install_allocator({{"cap", "2GiB"}}); });
  CHECK(contains(text, "installed already with cap:1GiB (from install_allocator())"));
  CHECK(contains(text, "cap:2GiB has to be given to the first"));

  const auto in_force = settings();
  const auto cap = std::find_if(in_force.begin(), in_force.end(),
                                [](const Setting& s) { return s.key == "cap"; });
  REQUIRE(cap != in_force.end());
  CHECK(cap->value == "1GiB");
  CHECK(cap->source == "install_allocator()");
}

SCENARIO("Every byte of the device is accounted for", "[installed]") {
  testbed::install(kOurs);
  const Block first(1);  // opens the device
  const MemoryInfo before = memory_info();
  const Block block(64 * kMiB + 1);
  const MemoryInfo info = memory_info(0);
  CHECK(info.device == 0);
  CHECK(info.allocator == "gpumemx");
  CHECK(info.live == before.live + 64 * kMiB + 512);
  CHECK(info.reserved >= info.live);
  CHECK(info.reserved == info.live + info.pending + info.cached + info.held);
  REQUIRE(info.device_known);
  CHECK(info.total == info.reserved + info.others + info.free);
  CHECK(info.free == testbed::driver_free());
  REQUIRE(info.cap.has_value());
  CHECK(*info.cap == kGiB);

  const std::string summary = memory_summary();
  CHECK(contains(summary, "GPU 0 memory, allocator gpumemx, "));
  CHECK(contains(summary, "= live + pending + cached + held"));
  CHECK(summary.back() != '\n');
}

SCENARIO("A device that is not there is named", "[installed]") {
  testbed::install(kOurs);
  const Block block(1);
  for (const std::string& text : {error_text<std::out_of_range>([] { memory_info(63); }),
                                  error_text<std::out_of_range>([] { memory_summary(63); }),
                                  error_text<std::out_of_range>([] { clear_cache(63); }),
                                  error_text<std::out_of_range>([] { trim_to(0, 63); }),
                                  error_text<std::out_of_range>([] { GPUMonitor("none", 63); })}) {
    CHECK(contains(text, "gpumemx: there is no CUDA device 63; this process has "));
  }
  CHECK(contains(error_text<std::out_of_range>([] { memory_info(-2); }), "no CUDA device -2"));
}

SCENARIO("The cache goes back to the device, whole or in part", "[installed]") {
  testbed::install(kOurs);
  const Block small(1);
  clear_cache(kCurrentDevice, true);
  const std::uint64_t at_first = testbed::driver_free();
  const std::uint64_t reserved_at_first = memory_info().reserved;

  GIVEN("a cache of 512 MiB beside a block that is in use") {
    const Block in_use(64 * kMiB);
    {
      std::vector<Block> blocks;
      for (int i = 0; i < 8; ++i) blocks.emplace_back(64 * kMiB);
    }
    const MemoryInfo before = memory_info();
    REQUIRE(before.cached >= 512 * kMiB);

    WHEN("it is trimmed to 320 MiB") {
      const Released released = trim_to(320 * kMiB, kCurrentDevice, true);
      THEN("256 MiB of it stay, and the parts add up") {
        const MemoryInfo after = memory_info();
        CHECK(after.reserved <= 320 * kMiB);
        CHECK(after.reserved >= 256 * kMiB);  // no more went than had to, but for a piece of 64 MiB
        CHECK(released.device == 0);
        CHECK(released.released == before.reserved - after.reserved);
        CHECK(released.kept == after.cached);
        CHECK(released.live == after.live);
        CHECK(sum(released) == before.reserved);
        CHECK(contains(released.text, "given back; "));
        CHECK(contains(released.text, "kept as asked"));
      }
    }
    WHEN("it is trimmed to more than there is") {
      const Released released = trim_to(kGiB, kCurrentDevice, true);
      THEN("all stays") {
        CHECK(released.released == 0);
        CHECK(memory_info().reserved == before.reserved);
      }
    }
    WHEN("it is cleared") {
      const Released released = clear_cache(kCurrentDevice, true);
      THEN("what is not in use is the driver's again") {
        const MemoryInfo after = memory_info();
        CHECK(after.cached == 0);
        CHECK(released.released >= 512 * kMiB);
        CHECK(released.kept == 0);
        CHECK(sum(released) == before.reserved);
        // The driver agrees, but for what it keeps for its own tables.
        const std::uint64_t taken = at_first - testbed::driver_free();
        CHECK(taken + 8 * kMiB >= after.reserved - reserved_at_first);
        CHECK(taken <= after.reserved - reserved_at_first + 8 * kMiB);
      }
    }
  }
}

SCENARIO("A monitor tells what a part of the program did", "[installed]") {
  testbed::install(kOurs);
  const Block small(1);
  clear_cache(kCurrentDevice, true);
  static_assert(std::is_nothrow_move_constructible_v<GPUMonitor>);
  static_assert(!std::is_copy_constructible_v<GPUMonitor>);

  WHEN("blocks come and go inside") {
    const std::uint64_t live = memory_info().live;
    GPUMonitor outer("outer", 0);
    Block kept(32 * kMiB);
    {
      GPUMonitor inner("inner");
      {
        const Block gone(96 * kMiB);
      }
      inner.end();
      kept.reset();
      THEN("each has its own figures, which stay as they were when it ended") {
        CHECK(inner.name() == "inner");
        CHECK(inner.device() == 0);
        CHECK(inner.before() == live + 32 * kMiB);
        CHECK(inner.after() == live + 32 * kMiB);
        CHECK(inner.delta() == 0);
        CHECK(inner.peak() == live + 128 * kMiB);
        CHECK(inner.allocations() == 1);
        CHECK(inner.driver_calls() > 0);
        CHECK(inner.driver_seconds() > 0);
        CHECK(inner.exact());
        CHECK(outer.before() == live);
        CHECK(outer.delta() == 0);
        CHECK(outer.peak() == live + 128 * kMiB);
        CHECK(outer.allocations() == 2);
      }
    }
  }

  WHEN("one ends that was to report") {
    std::vector<std::string> reports;
    const auto note = [&](const GPUMonitor& monitor) { reports.push_back(monitor.report()); };
    Block kept(1);
    {
      GPUMonitor monitor("load", note);
      kept = Block(48 * kMiB);
    }
    THEN("it hands the report over, once") {
      REQUIRE(reports.size() == 1);
      CHECK(contains(reports[0], "load: peak 48.00 MiB, kept +48.00 MiB, "));
      CHECK(contains(reports[0], " driver calls in "));
      GPUMonitor twice("twice", note);
      twice.end();
      twice.end();
      CHECK(reports.size() == 2);
    }
  }

  WHEN("one is moved") {
    int reports = 0;
    const auto count = [&](const GPUMonitor&) { ++reports; };
    {
      GPUMonitor first("first", count);
      GPUMonitor second = std::move(first);
      CHECK(second.name() == "first");
      CHECK(first.name().empty());  // NOLINT: what a moved one says is documented
      CHECK(first.peak() == 0);
      CHECK(first.report().empty());
      first.end();
      CHECK(reports == 0);
      second = GPUMonitor("third", count);
      CHECK(reports == 1);
      CHECK(second.name() == "third");
    }
    THEN("each measured part reports once") { CHECK(reports == 2); }
  }

  WHEN("the report fails") {
    THEN("the program goes on, and stderr says why") {
      const auto fails = [](const GPUMonitor&) { throw std::runtime_error("no"); };
      CHECK(stderr_of([&] { GPUMonitor("broken", fails); }) ==
            "gpumemx: the report of the monitor 'broken' failed: no\n");
    }
  }
  WHEN("it is to be printed") {
    THEN("it is a line on stderr") {
      REQUIRE(memory_info().live == 512);
      const std::string printed = stderr_of([] { GPUMonitor("printed", print_report); });
      CHECK(contains(printed, "printed: peak 512 B, kept +0 B, "));
      CHECK(contains(printed, " ms\n"));
    }
  }
}

SCENARIO("A monitor costs less than a microsecond", "[installed][cost]") {
  testbed::install(kOurs);
  const Block small(1);
  // The best of many: what else runs on the machine is not what is measured.
  constexpr int kTimes = 200, kBatch = 100;
  double best_ns = 1e12;
  for (int i = 0; i < kTimes; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    for (int j = 0; j < kBatch; ++j) const GPUMonitor monitor("step");
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    best_ns = std::min(best_ns, took.count() / kBatch);
  }
  WARN("a monitor takes " << static_cast<int>(best_ns) << " ns from its begin to its end");
  // A build that validates every structure in every call is not what users get.
  if (!build::kParanoid) CHECK(best_ns < 1000);
}

SCENARIO("A program is asked for memory before a request fails", "[installed]") {
  testbed::install(kOurs);
  const Block small(1);
  clear_cache(kCurrentDevice, true);
  auto model = std::make_unique<Block>(700 * kMiB);
  std::vector<MemoryPressure> asked;
  auto registration = on_memory_pressure([&](const MemoryPressure& pressure) {
    asked.push_back(pressure);
    const bool freed = model != nullptr;
    model = nullptr;
    return freed;
  });

  WHEN("a request does not fit beside what is loaded") {
    const Block request(500 * kMiB);
    THEN("it is served from what the program unloaded") {
      REQUIRE(asked.size() == 1);
      CHECK(asked[0].device == 0);
      CHECK(asked[0].requested == 500 * kMiB);
      CHECK(asked[0].device_free > 2 * kGiB);  // the cap is what is short, not the device
      CHECK(asked[0].cached < 500 * kMiB);
      CHECK(model == nullptr);
      const Block fits(400 * kMiB);
      CHECK(asked.size() == 1);
    }
  }
  WHEN("nothing can be freed") {
    THEN("the request fails as torch's do") {
      CHECK(contains(error_text<std::exception>([] { testbed::allocate(2 * kGiB); }),
                     "CUDA out of memory. Tried to allocate 2.00 GiB"));
      CHECK(asked.size() == 1);  // the model went, and was not enough
      CHECK(model == nullptr);
    }
  }
  WHEN("the registration has ended") {
    registration = PressureRegistration();
    THEN("nobody is asked") {
      CHECK_THROWS(testbed::allocate(500 * kMiB));
      CHECK(asked.empty());
      CHECK(model != nullptr);
    }
  }
  WHEN("it was moved and a second one throws") {
    const PressureRegistration moved = std::move(registration);
    const auto broken = on_memory_pressure(
        [](const MemoryPressure&) -> bool { throw std::runtime_error("no model to unload"); });
    const Block request(500 * kMiB);
    THEN("the first still serves") { CHECK(asked.size() == 1); }
  }
}

SCENARIO("The history becomes a file that the tools read", "[installed]") {
  testbed::install(kOurs);
  const Block small(1);
  const TemporaryFile file;

  CHECK_FALSE(history_enabled());
  enable_history({1000, true});
  CHECK(history_enabled());
  const Block kept(24 * kMiB);
  {
    const Block gone(48 * kMiB);
  }
  save_snapshot(file.path);
  disable_history();
  CHECK_FALSE(history_enabled());

  const auto snapshot = read_snapshot(file.path);
  REQUIRE(snapshot.ok());
  REQUIRE(snapshot.value().has_segments);
  const auto analysis = analyze(snapshot.value());
  REQUIRE(analysis.ok());
  REQUIRE_FALSE(analysis.value().devices.empty());
  const DeviceAnalysis& device = analysis.value().devices[0];
  CHECK(device.live_now >= 24 * kMiB);
  CHECK(device.peak_live == device.live_now + 48 * kMiB);
  REQUIRE(device.reserved_now.has_value());
  CHECK(*device.reserved_now >= device.live_now);
  CHECK(*device.reserved_now <= memory_info().reserved);
  REQUIRE_FALSE(device.by_site.empty());
  // Stacks are C++'s, and the innermost function of this program is the testbed's.
  CHECK(device.by_site[0].bytes == 72 * kMiB);
  CHECK(contains(device.by_site[0].name, "testbed"));

  WHEN("it is recorded without stacks") {
    enable_history({10, false});
    {
      const Block gone(8 * kMiB);
    }
    save_snapshot(file.path);
    disable_history();
    const auto plain = read_snapshot(file.path);
    REQUIRE(plain.ok());
    CHECK(plain.value().entries.rows() >= 3);
    CHECK(plain.value().entries.rows() <= 10);
  }
  WHEN("the file cannot be written") {
    const std::string text =
        error_text<std::system_error>([] { save_snapshot("/no/such/folder/run.pickle"); });
    CHECK(contains(text, "cannot write '/no/such/folder/run.pickle': No such file or directory"));
  }
}

SCENARIO("Monitors and figures may be asked from several threads", "[installed]") {
  testbed::install(kOurs);
  const Block small(1);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int j = 0; j < 200; ++j) {
        GPUMonitor monitor("thread");
        const Block block(kMiB);
        (void)memory_info();
        if (j % 50 == 0) clear_cache(kCurrentDevice, true);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const MemoryInfo info = memory_info();
  CHECK(info.live <= 2 * kMiB + 1024);
}

// --- torch's own allocator

SCENARIO("All functions work on torch's own allocator, and say what they cannot know", "[torch]") {
  const Environment disabled("GPUMEMX_DISABLE", "1");
  testbed::install(kOurs);
  REQUIRE_FALSE(is_installed());
  const Block small(1);
  clear_cache(kCurrentDevice, true);
  const MemoryInfo before = memory_info();
  CHECK(before.allocator == "torch");

  GPUMonitor monitor("load");
  {
    std::vector<Block> blocks;
    for (int i = 0; i < 4; ++i) blocks.emplace_back(64 * kMiB);
    const MemoryInfo info = memory_info();
    CHECK(info.live == before.live + 256 * kMiB);
    CHECK(info.reserved == info.live + info.pending + info.cached + info.held);
    REQUIRE(info.device_known);
    CHECK(info.total == info.reserved + info.others + info.free);
    CHECK(contains(memory_summary(), "allocator torch"));
    CHECK(contains(memory_summary(), "These are torch's own figures"));
  }
  CHECK(monitor.allocations() == 4);
  CHECK(monitor.peak() >= before.live + 256 * kMiB);
  CHECK(monitor.delta() == 0);
  CHECK_FALSE(monitor.exact());
  CHECK(contains(monitor.report(), "calls of cudaMalloc and cudaFree"));

  const MemoryInfo cached = memory_info();
  const Released nothing = trim_to(kGiB, kCurrentDevice, true);
  CHECK(nothing.released == 0);
  CHECK(nothing.kept == cached.cached);
  CHECK(sum(nothing) == cached.reserved);
  const Released released = trim_to(128 * kMiB, kCurrentDevice, true);  // all or nothing
  CHECK(released.released >= 256 * kMiB);
  CHECK(memory_info().reserved == before.reserved);
  CHECK(contains(error_text<std::out_of_range>([] { memory_info(63); }), "no CUDA device 63"));

  const TemporaryFile file;
  enable_history({1000, false});
  CHECK(history_enabled());
  {
    const Block gone(8 * kMiB);
  }
  save_snapshot(file.path);
  disable_history();
  CHECK_FALSE(history_enabled());
  const auto snapshot = read_snapshot(file.path);
  REQUIRE(snapshot.ok());
  CHECK(snapshot.value().entries.rows() >= 3);

  // It is too late for gpumemx, and the error says what to do.
  unsetenv("GPUMEMX_DISABLE");
  const std::string text = error_text<InstallError>([] { install_allocator(); });
  CHECK(contains(text,
                 "CUDA has started already in this process. Call gpumemx::install_allocator()"));
  Settings late = kOurs;
  late.late = true;
  install_allocator(late);
  CHECK(is_installed());
  const Block ours(32 * kMiB);
  CHECK(memory_info().allocator == "gpumemx");
  CHECK(memory_info().live == 32 * kMiB);
}

}  // namespace
}  // namespace gpumemx
