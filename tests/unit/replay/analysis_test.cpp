// SPDX-License-Identifier: BSD-3-Clause
//
// What is said of a snapshot: peak, who was alive then, fragmentation, out of memory, series.
#include "replay/analysis.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/pickles.hpp"

namespace gpumemx {
namespace {

using namespace pickles;

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::int64_t kBase = 0x7f0000000000;
const std::string kTorch = "/usr/lib/python3/site-packages/torch/";

Analysis analysis_of(const std::string& bytes) {
  auto snapshot = read(bytes);
  EXPECT_TRUE(snapshot.ok()) << snapshot.error().where;
  auto analysis = analyze(snapshot.value());
  EXPECT_TRUE(analysis.ok()) << analysis.error().where;
  return std::move(analysis).take();
}
DeviceAnalysis device_of(const std::string& bytes) { return analysis_of(bytes).devices.at(0); }

TEST(Analysis, CaseA36TellsTheFiguresOfARecordedSnapshot) {
  auto snapshot =
      read_snapshot(std::string(GPUMEMX_SOURCE_DIR) + "/tests/data/gnn_sampling.pickle");
  ASSERT_TRUE(snapshot.ok());
  const auto analysis = analyze(snapshot.value());
  ASSERT_TRUE(analysis.ok());
  ASSERT_EQ(analysis.value().devices.size(), 1u);
  const DeviceAnalysis& d = analysis.value().devices[0];
  EXPECT_EQ(d.events, 771u);
  EXPECT_EQ(d.peak_live, 5'261'699'720u);
  EXPECT_EQ(d.peak_event, 596);
  EXPECT_EQ(d.peak_time_us, 1'796'019'545'278'306);
  EXPECT_EQ(d.peak_reserved, 7'038'042'112u);
  EXPECT_EQ(d.baseline_bytes, 0u);
  EXPECT_EQ(d.unknown_frees, 0u);
  EXPECT_EQ(d.live_now, 68'157'440u);
  EXPECT_EQ(d.at_peak.live, d.peak_live);
  EXPECT_EQ(d.at_peak.reserved, 7'038'042'112u);
  EXPECT_EQ(d.by_site.at(0).name, "train.py:118 gnn_sampling");
  for (const auto* groups : {&d.by_site, &d.by_size_class, &d.by_category}) {
    std::uint64_t bytes = 0;
    for (const AliveGroup& group : *groups) bytes += group.bytes;
    EXPECT_EQ(bytes, d.peak_live);
  }
  std::uint64_t highest = 0;
  for (const SeriesPoint& point : d.series) highest = std::max(highest, point.live);
  EXPECT_EQ(highest, d.peak_live);
}

TEST(Analysis, FindsTheFirstEventOfThePeak) {
  const DeviceAnalysis d = device_of(snapshot({}, {{{"alloc", kBase, 100, 1},
                                                    {"alloc", kBase + 512, 50, 2},
                                                    {"free_requested", kBase, 100, 3},
                                                    {"alloc", kBase, 100, 4}}}));
  EXPECT_EQ(d.peak_event, 1);
  EXPECT_EQ(d.peak_live, 150u);
  EXPECT_EQ(d.peak_time_us, 2);
}

TEST(Analysis, APeakCanBeBeforeTheFirstEvent) {
  const DeviceAnalysis d =
      device_of(snapshot({{kBase, 2 * kMiB, {{kBase, 512, 300}}}},
                         {{{"free_requested", kBase + 512, 100, 5}, {"snapshot", 0, 0, 6}}}));
  EXPECT_EQ(d.peak_event, -1);
  EXPECT_EQ(d.peak_time_us, std::nullopt);
  EXPECT_EQ(d.peak_live, 400u);
  EXPECT_EQ(d.by_site.at(0).name, "(before the recording)");
}

std::string site_of(const std::vector<std::string>& frames) {
  std::vector<Entry> entries{{"alloc", kBase, 100, 1, 0, frames}, {"snapshot", 0, 0, 2}};
  return device_of(snapshot({}, {entries})).by_site.at(0).name;
}

TEST(Analysis, NamesTheInnermostLineThatIsNotTorchs) {
  EXPECT_EQ(
      site_of({frame("/pytorch/aten/src/ATen/native/Linear.cpp", 3, "at::linear(...)"),
               frame("??", 0, "PyEval_EvalFrame"),
               frame(kTorch + "nn/modules/linear.py", 125, "forward"),
               frame("<frozen runpy>", 1, "run"),
               frame("/tmp/torchinductor_me/ab/cabc.py", 77, "call"),
               frame("/home/me/model.py", 10, "forward"), frame("/home/me/train.py", 20, "main")}),
      "/home/me/model.py:10 forward");
  EXPECT_EQ(site_of({frame(kTorch + "nn/modules/linear.py", 125, "forward"),
                     frame(kTorch + "nn/modules/module.py", 1700, "_call_impl")}),
            kTorch + "nn/modules/linear.py:125 forward");
  EXPECT_EQ(site_of({}), "(no frames recorded)");
}

TEST(Analysis, NamesTheFunctionOfACppProgramThatAllocated) {
  const std::vector<std::string> torchs{
      frame("??", 0, "torch::unwind::unwind()"),
      frame("??", 0, "gpumemx::adapter::TorchAllocator::allocate(unsigned long)"),
      frame("??", 0, "at::empty(c10::ArrayRef<long>)")};
  auto stack = torchs;
  stack.push_back(frame("serve.cpp", 40, "Server::load(at::Tensor const&)"));
  stack.push_back(frame("serve.cpp", 90, "main"));
  EXPECT_EQ(site_of(stack), "serve.cpp:40 Server::load(at::Tensor const&)");
  // A thread of torch's has nothing of the program.
  stack = torchs;
  stack.push_back(frame("??", 0, "std::thread::_State_impl<run>::_M_run()"));
  stack.push_back(frame("??", 0, "start_thread"));
  EXPECT_EQ(site_of(stack), "??:0 torch::unwind::unwind()");
}

std::string category_of(const std::vector<std::string>& frames, std::int64_t size = 100) {
  // Another entry has frames, so that an entry without them says something.
  std::vector<Entry> entries{{"alloc", kBase, size, 1, 0, frames},
                             {"free_requested", kBase, size, 2, 0, {frame("a.py", 1, "main")}}};
  return device_of(snapshot({}, {entries})).by_category.at(0).name;
}

TEST(Analysis, TellsWhatABlockIsToATrainingRun) {
  const std::string module = kTorch + "nn/modules/module.py";
  const std::string user = frame("train.py", 1, "main");
  EXPECT_EQ(category_of({frame(module, 1, "convert"), frame(module, 2, "_apply"), user}),
            "parameters");
  EXPECT_EQ(category_of({frame("model.py", 1, "__init__"), user}), "parameters");
  EXPECT_EQ(category_of({frame("model.py", 1, "forward"), frame(module, 2, "_call_impl"), user}),
            "activations");
  EXPECT_EQ(category_of({frame(kTorch + "optim/adam.py", 1, "_init_group"), user}),
            "optimizer state");
  EXPECT_EQ(category_of({frame(kTorch + "optim/adam.py", 1, "_multi_tensor_adam"), user}),
            "workspaces");
  EXPECT_EQ(category_of({frame(kTorch + "autograd/graph.py", 1, "_engine_run_backward"), user}),
            "gradients");
  // Recomputed in the backward pass: the innermost frame that says anything decides.
  EXPECT_EQ(category_of({frame("model.py", 1, "forward"),
                         frame(kTorch + "autograd/graph.py", 1, "_engine_run_backward"), user}),
            "activations");
  EXPECT_EQ(category_of({}), "gradients");  // autograd's own threads run no Python
  EXPECT_EQ(category_of({user}), "unknown");
  EXPECT_EQ(category_of({user}, 8'519'680), "workspaces");
  EXPECT_EQ(category_of({frame("x.cpp", 1, "at::cuda::getWorkspaceSize()"), user}), "workspaces");
}

TEST(Analysis, PutsSizesIntoClasses) {
  std::vector<Entry> entries;
  for (const std::int64_t size : {std::int64_t{0}, std::int64_t{512}, std::int64_t{513}, kMiB,
                                  kMiB + 1, std::int64_t{5} << 30}) {
    entries.push_back({"alloc", kBase + static_cast<std::int64_t>(entries.size()) * 512, size});
  }
  std::vector<std::string> said;
  for (const AliveGroup& g : device_of(snapshot({}, {entries})).by_size_class) {
    said.push_back(g.name + ": " + std::to_string(g.count));
  }
  EXPECT_EQ(said,
            (std::vector<std::string>{"up to 512 B: 2", "512 B to 64 KiB: 1", "64 KiB to 1 MiB: 1",
                                      "1 MiB to 10 MiB: 1", "above 4 GiB: 1"}));
}

// Segment A of 20 MiB is used in its middle, B of 20 MiB by one small block, C of 2 MiB not at all, and
// D, which was there at the peak, was given back before the snapshot.
TEST(Analysis, SaysHowMuchOfWhatIsReservedIsFreeAndWhere) {
  const std::int64_t a = kBase, b = a + 32 * kMiB, c = b + 32 * kMiB, d_at = c + 32 * kMiB;
  const std::vector<std::string> holder{frame("train.py", 9, "log")};
  const DeviceAnalysis d = device_of(
      snapshot({{a, 20 * kMiB}, {b, 20 * kMiB, {{b, kMiB, kMiB}}}, {c, 2 * kMiB}},
               {{{"segment_alloc", a, 20 * kMiB, 1},
                 {"alloc", a + 4 * kMiB, 6 * kMiB, 2},
                 {"alloc", b, kMiB, 3, 0, holder},
                 {"alloc", a + 10 * kMiB, kMiB, 3},
                 {"free_requested", a + 10 * kMiB, kMiB, 3},  // its stream is not done at the peak
                 {"alloc", d_at, 3 * kMiB, 4},
                 {"free_completed", a + 10 * kMiB, kMiB, 5},
                 {"free_requested", d_at, 3 * kMiB, 5},
                 {"free_completed", d_at, 3 * kMiB, 5},
                 {"segment_free", d_at, 4 * kMiB, 5},
                 {"free_requested", a + 4 * kMiB, 6 * kMiB, 6}}}));
  EXPECT_EQ(d.peak_event, 5);
  EXPECT_EQ(d.peak_live, 10u * kMiB);
  EXPECT_EQ(d.peak_reserved, 46u * kMiB);
  EXPECT_EQ(d.at_peak.reserved, 46u * kMiB);
  EXPECT_EQ(d.at_peak.live, 10u * kMiB);
  EXPECT_EQ(d.at_peak.largest_free, 19u * kMiB);
  EXPECT_EQ(d.at_peak.free_in_busy_segments, (4u + 9 + 19 + 1) * kMiB);
  ASSERT_EQ(d.lonely.size(), 1u);
  EXPECT_EQ(d.lonely[0].segment, (AddrRange{{static_cast<std::uint64_t>(b)}, 20_MiB}));
  EXPECT_EQ(d.lonely[0].held_by, "train.py:9 log");
  EXPECT_EQ(d.lonely[0].bytes, 1u * kMiB);
}

TEST(Analysis, PutsThePiecesOfExpandableSegmentsTogether) {
  // At the peak, pieces 0 to 3 of 2 MiB stand; then 1 is unmapped, and 2 and 3 are one piece.
  const auto piece = [](int i) { return kBase + i * 2 * kMiB; };
  const std::string bytes =
      snapshot({{piece(0), 2 * kMiB, {}, 0, true}, {piece(2), 4 * kMiB, {}, 0, true}},
               {{{"segment_map", piece(0), 4 * kMiB, 1},
                 {"segment_map", piece(2), 4 * kMiB, 2},
                 {"alloc", piece(0), 512, 3},
                 {"free_requested", piece(0), 512, 4},
                 {"segment_unmap", piece(1), 2 * kMiB, 5}}});
  const DeviceAnalysis d = device_of(bytes);
  EXPECT_EQ(d.peak_reserved, 8u * kMiB);
  EXPECT_EQ(d.at_peak.reserved, 8u * kMiB);
  EXPECT_EQ(d.at_peak.largest_free,
            8u * kMiB - 512);  // in one piece, since it is one segment again
  ASSERT_EQ(d.lonely.size(), 1u);
  EXPECT_EQ(d.lonely[0].segment.size, 8_MiB);
}

TEST(Analysis, SaysWhatAnOutOfMemoryEventMeant) {
  const auto meaning = [](std::int64_t requested, std::int64_t device_free, std::int64_t live) {
    // 100 MiB reserved; what is free in it is in two pieces, around a block in the middle.
    const std::int64_t at = kBase + (100 * kMiB - live) / 2;
    const DeviceAnalysis d =
        device_of(snapshot({{kBase, 100 * kMiB, {{at, live, live}}}},
                           {{{"alloc", at, live, 1}, {"oom", device_free, requested, 2}}}));
    EXPECT_EQ(d.ooms.size(), 1u);
    EXPECT_EQ(d.ooms[0].event, 1);
    EXPECT_EQ(d.ooms[0].requested, static_cast<std::uint64_t>(requested));
    EXPECT_EQ(d.ooms[0].live, static_cast<std::uint64_t>(live));
    EXPECT_EQ(d.ooms[0].reserved, 100u * kMiB);
    return d.ooms[0].meaning;
  };
  EXPECT_EQ(
      meaning(30 * kMiB, 10 * kMiB, 60 * kMiB),
      "Fragmentation: 40.00 MiB of 100.00 MiB reserved was free, enough for 30.00 MiB, but in "
      "pieces, the largest of 20.00 MiB; the device had 10.00 MiB left. The memory was there: an "
      "allocator that can move free memory together would have served it.");
  EXPECT_EQ(
      meaning(45 * kMiB, 10 * kMiB, 60 * kMiB),
      "Fragmentation: 40.00 MiB free in 100.00 MiB reserved and 10.00 MiB left on the device are "
      "enough for 45.00 MiB only together.");
  EXPECT_EQ(
      meaning(200 * kMiB, 10 * kMiB, 60 * kMiB),
      "Too much was live: 60.00 MiB of 100.00 MiB reserved, and the device had 10.00 MiB left. "
      "Even without fragmentation 200.00 MiB lacked 150.00 MiB.");
  EXPECT_EQ(meaning(5 * kMiB, 10 * kMiB, 60 * kMiB),
            "The device had 10.00 MiB free, enough for 5.00 MiB: a limit refused it "
            "(set_per_process_memory_fraction), or the driver did.");
}

TEST(Analysis, SaysWhenFreeMemoryBelongsToPrivatePools) {
  const DeviceAnalysis d =
      device_of(snapshot({{kBase, 64 * kMiB, {{kBase, kMiB, kMiB}}, 0, false, 3}},
                         {{{"alloc", kBase, kMiB, 1}, {"oom", 2 * kMiB, 32 * kMiB, 2}}}));
  EXPECT_NE(d.ooms.at(0).meaning.find("63.00 MiB of it belongs to private pools"),
            std::string::npos)
      << d.ooms[0].meaning;
}

TEST(Analysis, TheSeriesHasAllEventsOrTheHighestOfEachSpan) {
  std::vector<Entry> entries;
  for (int i = 0; i < 50'000; ++i) {
    entries.push_back({"alloc", kBase, i == 31'337 ? 1000 : 100, 1'000'000 + i * 10});
    entries.push_back({"free_requested", kBase, 100, 1'000'003 + i * 10});
  }
  const DeviceAnalysis many = device_of(snapshot({}, {entries}));
  EXPECT_LE(many.series.size(), 4000u);
  EXPECT_GE(many.series.size(), 3000u);
  int highest = 0;
  for (std::size_t i = 0; i < many.series.size(); ++i) {
    EXPECT_TRUE(i == 0 || many.series[i].time_us > many.series[i - 1].time_us);
    EXPECT_TRUE(many.series[i].live == 100 || many.series[i].live == 1000);
    highest += many.series[i].live == 1000 ? 1 : 0;
  }
  EXPECT_EQ(highest, 1);

  entries.resize(10);
  const DeviceAnalysis few = device_of(snapshot({}, {entries}));
  ASSERT_EQ(few.series.size(), 11u);  // and what was before
  EXPECT_EQ(few.series[0].live, 0u);
  EXPECT_EQ(few.series[1].live, 100u);
  EXPECT_EQ(few.series[2].time_us, 1'000'003);
}

TEST(Analysis, ASpanWithoutEventsHasWhatStoodBefore) {
  std::vector<Entry> entries;
  for (int i = 0; i < 5000; ++i) {
    entries.push_back({i % 2 == 0 ? "alloc" : "free_requested", kBase, 100, i});
  }
  entries.push_back({"alloc", kBase, 7, 1'000'000});
  entries.push_back({"free_requested", kBase, 7, 2'000'000});
  const DeviceAnalysis d = device_of(snapshot({}, {entries}));
  ASSERT_LE(d.series.size(), 4000u);
  for (const SeriesPoint& point : d.series) {
    const bool quiet = point.time_us > 5000 && point.time_us + 1000 < 1'000'000;
    EXPECT_TRUE(!quiet || point.live == 0) << point.time_us;
  }
  EXPECT_EQ(d.series.back().live, 7u);
}

TEST(Analysis, CaseA37OfNothingIsAClearError) {
  auto snapshot = read(pickles::snapshot({}, {{}}));
  ASSERT_TRUE(snapshot.ok());
  EXPECT_EQ(
      analyze(snapshot.value()).error().where,
      "the snapshot is empty: no segments and no history; take it while the program holds device "
      "memory, after torch.cuda.memory._record_memory_history()");
}

}  // namespace
}  // namespace gpumemx
