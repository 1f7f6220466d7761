// SPDX-License-Identifier: BSD-3-Clause
//
// SettingSet as people write them: right ones have their effect, and each mistake is one sentence
// that a person can act on and changes nothing.
#include "runtime/setting_set.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace gpumemx {
namespace {

SettingSet::Entry entry(const SettingSet& settings, const std::string& key) {
  for (SettingSet::Entry& e : settings.list()) {
    if (e.key == key) return e;
  }
  return {};
}

// What `text` sets as "key:value" in the order of the table, or the mistake that it has.
std::string applied(const std::string& text) {
  SettingSet settings;
  if (const auto mistake = settings.apply(text, "GPUMEMX_CONF")) return *mistake;
  std::string set;
  for (const SettingSet::Entry& e : settings.list()) {
    if (e.source != "GPUMEMX_CONF") continue;
    set += set.empty() ? "" : ",";
    set += e.key + ":" + e.value;
  }
  return set;
}

std::vector<std::string> words(const std::vector<ConfPair>& pairs) {
  std::vector<std::string> all;
  for (const ConfPair& pair : pairs) {
    const std::string separator(1, pair.separator == '\0' ? '!' : pair.separator);
    all.push_back(pair.key + separator + pair.value);
  }
  return all;
}

using Words = std::vector<std::string>;

struct Case {
  const char* text;
  const char* outcome;
};

TEST(SettingSet, TakesTextsAsPeopleWriteThem) {
  const Case cases[] = {
      {"", ""},
      {"  \t\n", ""},
      {",", ""},
      {"cap:8GiB", "cap:8GiB"},
      {"cap:8GiB,", "cap:8GiB"},
      {",cap:8GiB,,slack:0.5", "cap:8GiB,slack:0.5"},
      {" cap : 8 GiB , slack : 0.01 ", "cap:8GiB,slack:0.01"},
      {"CAP:8gib,Mode:Plain", "cap:8GiB,mode:plain"},
      {"cap:24G", "cap:24GiB"},
      {"cap:1.5GiB", "cap:1536MiB"},
      {"cap:2097152", "cap:2MiB"},
      {"cap:2097153", "cap:2097153B"},
      {"cap:none", "cap:none"},
      {"cap:None", "cap:none"},
      {"mode:virtual", "mode:virtual"},
      {"background:True", "background:true"},
      {"background:on", "background:true"},
      {"background:1", "background:true"},
      {"background:FALSE", "background:false"},
      {"slack:0", "slack:0"},
      {"slack:1e-05", "slack:1e-05"},
      {"slack:1", "slack:1"},
      {"hit_waste:0", "hit_waste:0B"},
      {"max_aliases:1", "max_aliases:1"},
      {"tight_from:1", "tight_from:1"},
      {"slack:0.1,slack:0.2", "slack:0.2"},
      {"rest_handle:64MiB,rest_handle_max:64MiB", "rest_handle:64MiB,rest_handle_max:64MiB"},
  };
  for (const Case& c : cases) EXPECT_EQ(applied(c.text), c.outcome) << "text: " << c.text;
}

TEST(SettingSet, NamesEachMistakeAndWhatToWrite) {
  const Case cases[] = {
      {"cap=8GiB", "GPUMEMX_CONF: 'cap=8GiB' has '=' in the place of ':'; write cap:8GiB"},
      {"slack:0.1, Cap = 8 GiB",
       "GPUMEMX_CONF: 'cap=8GiB' has '=' in the place of ':'; write cap:8GiB"},
      {"slak:0.1", "GPUMEMX_CONF: there is no setting 'slak'; the nearest name is 'slack'"},
      {"slak=0.1", "GPUMEMX_CONF: there is no setting 'slak'; the nearest name is 'slack'"},
      {"max-aliases:4",
       "GPUMEMX_CONF: there is no setting 'max-aliases'; the nearest name is 'max_aliases'"},
      {"gpumemx_slack:0.1",
       "GPUMEMX_CONF: there is no setting 'gpumemx_slack'; the nearest name is 'slack'"},
      {":0.1", "GPUMEMX_CONF: there is no setting ''; the nearest name is 'cap'"},
      {"slack", "GPUMEMX_CONF: slack has no value; write slack: and a number from 0 to 1"},
      {"expandable_segments:True",
       "GPUMEMX_CONF: expandable_segments is a key of torch's, for PYTORCH_ALLOC_CONF; under "
       "gpumemx: no work left: memory is mapped page by page in any case (mode:plain turns that "
       "off)."},
      {"slack:", "GPUMEMX_CONF: '' is no value for slack, which takes a number from 0 to 1"},
      {"slack:2", "GPUMEMX_CONF: '2' is no value for slack, which takes a number from 0 to 1"},
      {"slack:-0.1",
       "GPUMEMX_CONF: '-0.1' is no value for slack, which takes a number from 0 to 1"},
      {"slack:nan", "GPUMEMX_CONF: 'nan' is no value for slack, which takes a number from 0 to 1"},
      {"price:inf", "GPUMEMX_CONF: 'inf' is no value for price, which takes a number, 0 or more"},
      {"tight_from:0",
       "GPUMEMX_CONF: '0' is no value for tight_from, which takes a number above 0 and at most 1"},
      {"slack:10%", "GPUMEMX_CONF: '10%' is no value for slack, which takes a number from 0 to 1"},
      // A size without its unit would leave 24 bytes to work with.
      {"cap:24",
       "GPUMEMX_CONF: '24' is no value for cap, which takes a size such as 512MiB, 2MiB or "
       "more, or none"},
      {"cap:0.9",
       "GPUMEMX_CONF: '0.9' is no value for cap, which takes a size such as 512MiB, 2MiB "
       "or more, or none"},
      {"cap:C:\\temp",
       "GPUMEMX_CONF: 'C:\\temp' is no value for cap, which takes a size such as 512MiB, 2MiB or "
       "more, or none"},
      {"overhang:none",
       "GPUMEMX_CONF: 'none' is no value for overhang, which takes a size from 0B to 64MiB"},
      {"small_handle:3MiB",
       "GPUMEMX_CONF: '3MiB' is no value for small_handle, which takes a power of two from 2MiB to "
       "64MiB"},
      {"hit_scan:0",
       "GPUMEMX_CONF: '0' is no value for hit_scan, which takes a whole number from 1 to 1000000"},
      {"hit_scan:4.5",
       "GPUMEMX_CONF: '4.5' is no value for hit_scan, which takes a whole number from 1 to "
       "1000000"},
      {"fence_frees:99999999999",
       "GPUMEMX_CONF: '99999999999' is no value for fence_frees, which takes a whole number from 1 "
       "to 1000000"},
      {"mode:cuda", "GPUMEMX_CONF: 'cuda' is no value for mode, which takes virtual or plain"},
      {"background:maybe",
       "GPUMEMX_CONF: 'maybe' is no value for background, which takes true or false"},
      // An earlier value that does not count is looked at all the same.
      {"slack:7,slack:0.1",
       "GPUMEMX_CONF: '7' is no value for slack, which takes a number from 0 to 1"},
      {"rest_handle:64MiB",
       "GPUMEMX_CONF: rest_handle_max must be at least rest_handle (rest_handle is 64MiB from "
       "GPUMEMX_CONF, rest_handle_max is 32MiB by default)"},
  };
  for (const Case& c : cases) EXPECT_EQ(applied(c.text), c.outcome) << "text: " << c.text;
}

TEST(SettingSet, AppliesNothingOfATextWithAMistake) {
  SettingSet settings;
  ASSERT_EQ(settings.apply("cap:8GiB", "GPUMEMX_CONF"), std::nullopt);
  for (const char* text : {"cap:4GiB,slak:0.1", "cap:4GiB,slack:2", "cap:4GiB,slack",
                           "cap:4GiB,rest_handle:64MiB", "cap:4GiB,slack=0.1"}) {
    EXPECT_TRUE(settings.apply(text, "second")) << text;
    EXPECT_EQ(settings.core().cap, 8_GiB) << text;
    EXPECT_EQ(entry(settings, "cap").source, "GPUMEMX_CONF") << text;
  }
}

TEST(SettingSet, KnowsTheSourceOfEachValueAndALaterSourceWins) {
  SettingSet settings;
  ASSERT_EQ(settings.apply_torch_conf("gpumemx_slack:0.1,gpumemx_cap:4GiB", "PYTORCH_ALLOC_CONF"),
            std::nullopt);
  ASSERT_EQ(settings.apply("cap:8GiB,price:2", "GPUMEMX_CONF"), std::nullopt);
  ASSERT_EQ(settings.set("price", "3", "install_allocator()"), std::nullopt);

  EXPECT_EQ(settings.core().slack, 0.1);
  EXPECT_EQ(settings.core().cap, 8_GiB);
  EXPECT_EQ(settings.core().price, 3);
  EXPECT_EQ(entry(settings, "slack").source, "PYTORCH_ALLOC_CONF");
  EXPECT_EQ(entry(settings, "cap").source, "GPUMEMX_CONF");
  EXPECT_EQ(entry(settings, "price").source, "install_allocator()");
  EXPECT_EQ(entry(settings, "hit_scan").source, "default");
}

TEST(SettingSet, SetsArgumentsInAnyOrder) {
  SettingSet settings;
  EXPECT_EQ(settings.set("big_handle", "64MiB", "args"), std::nullopt);
  EXPECT_EQ(settings.set("rest_handle", " 64 MiB ", "args"),
            "args: rest_handle_max must be at least rest_handle (rest_handle is 64MiB from args, "
            "rest_handle_max is 32MiB by default)");
  EXPECT_EQ(settings.set_all({{.key = "rest_handle", .value = "64MiB"},
                              {.key = "Rest_Handle_Max", .value = "64MiB"}},
                             "args"),
            std::nullopt);
  EXPECT_EQ(settings.core().rest_handle, 64_MiB);
  EXPECT_EQ(settings.core().rest_handle_max, 64_MiB);
  EXPECT_EQ(settings.set("bakground", "True", "args"),
            "args: there is no setting 'bakground'; the nearest name is 'background'");
}

TEST(SettingSet, PutsHigherSettingsOverLowerOnesAtOnce) {
  SettingSet low;
  SettingSet high;
  ASSERT_EQ(low.apply_torch_conf("gpumemx_slack:0.1,gpumemx_price:2", "PYTORCH_ALLOC_CONF"),
            std::nullopt);
  ASSERT_EQ(high.apply("rest_handle:64MiB,rest_handle_max:64MiB", "GPUMEMX_CONF"), std::nullopt);
  ASSERT_EQ(high.set("price", "16", "install_allocator()"), std::nullopt);
  high.note_torch("max_split_size_mb", "512", "PYTORCH_ALLOC_CONF");
  EXPECT_EQ(low.overlay(high), std::nullopt);
  EXPECT_EQ(low.core().slack, 0.1);
  EXPECT_EQ(low.core().price, 16);  // set to what is the default
  EXPECT_EQ(low.core().rest_handle, 64_MiB);
  EXPECT_EQ(entry(low, "slack").source, "PYTORCH_ALLOC_CONF");
  EXPECT_EQ(entry(low, "price").source, "install_allocator()");
  EXPECT_EQ(entry(low, "rest_handle_max").source, "GPUMEMX_CONF");
  EXPECT_EQ(entry(low, "cap").source, SettingSet::kDefaultSource);
  EXPECT_EQ(entry(low, "max_split_size_mb").value, "512");

  SettingSet other;
  ASSERT_EQ(other.apply_torch_conf("gpumemx_rest_handle_max:16MiB", "PYTORCH_ALLOC_CONF"),
            std::nullopt);
  SettingSet higher;
  ASSERT_EQ(higher.apply("cap:8GiB,rest_handle:32MiB", "GPUMEMX_CONF"), std::nullopt);
  EXPECT_EQ(other.overlay(higher),
            "rest_handle_max must be at least rest_handle (rest_handle is 32MiB from GPUMEMX_CONF, "
            "rest_handle_max is 16MiB from PYTORCH_ALLOC_CONF)");
  EXPECT_EQ(entry(other, "cap").source, SettingSet::kDefaultSource);
}

TEST(SettingSet, ReachesEveryOptionThatHasAKey) {
  SettingSet settings;
  ASSERT_EQ(settings.apply("cap:3GiB,mode:plain,pool_mode:plain,background:false,"
                           "slack:0.25,cushion:0.125,"
                           "cushion_until:3GiB,max_aliases:3,"
                           "hit_waste:5MiB,hit_scan:6,price:7.5,price_pages:8.5,overhang:9MiB,"
                           "tight_from:0.5,tight_price:1.5,tight_handle:16MiB,fence_frees:11,"
                           "fence_bytes:12MiB,max_fences:13,small_handle:4MiB,rest_handle:2MiB,"
                           "rest_handle_max:16MiB,big_handle:4MiB,big_handle_max:32MiB",
                           "GPUMEMX_CONF"),
            std::nullopt);
  const Options& o = settings.core();
  EXPECT_EQ(o.cap, 3_GiB);
  EXPECT_TRUE(o.plain);
  EXPECT_TRUE(o.plain_pools);
  EXPECT_FALSE(o.background);
  EXPECT_EQ(o.slack, 0.25);
  EXPECT_EQ(o.cushion, 0.125);
  EXPECT_EQ(o.cushion_until, 3_GiB);
  EXPECT_EQ(o.max_aliases, 3);
  EXPECT_EQ(o.hit_waste, 5_MiB);
  EXPECT_EQ(o.hit_scan, 6);
  EXPECT_EQ(o.price, 7.5);
  EXPECT_EQ(o.price_pages, 8.5);
  EXPECT_EQ(o.overhang, 9_MiB);
  EXPECT_EQ(o.tight_from, 0.5);
  EXPECT_EQ(o.tight_price, 1.5);
  EXPECT_EQ(o.tight_handle, 16_MiB);
  EXPECT_EQ(o.fence_frees, 11u);
  EXPECT_EQ(o.fence_bytes, 12_MiB);
  EXPECT_EQ(o.max_fences, 13u);
  EXPECT_EQ(o.small_handle, 4_MiB);
  EXPECT_EQ(o.rest_handle, 2_MiB);
  EXPECT_EQ(o.rest_handle_max, 16_MiB);
  EXPECT_EQ(o.big_handle, 4_MiB);
  EXPECT_EQ(o.big_handle_max, 32_MiB);
  for (const SettingSet::Entry& e : settings.list()) EXPECT_EQ(e.source, "GPUMEMX_CONF") << e.key;
}

TEST(SettingSet, ListsDefaultsThatCanBeGivenBack) {
  const SettingSet settings;
  EXPECT_EQ(entry(settings, "cap").value, "none");
  EXPECT_EQ(entry(settings, "mode").value, "virtual");
  EXPECT_EQ(entry(settings, "hit_waste").value, "2MiB");
  EXPECT_EQ(entry(settings, "tight_from").value, "0.7");
  EXPECT_EQ(
      entry(settings, "slack").note,
      "Growth over the peak of live memory, as a share of it, that goes before idle memory is "
      "moved: a number from 0 to 1.");

  SettingSet again;
  for (const SettingSet::Entry& e : settings.list()) {
    EXPECT_EQ(e.source, "default");
    EXPECT_EQ(again.set(e.key, e.value, "again"), std::nullopt);
    EXPECT_EQ(entry(again, e.key).value, e.value);
  }
}

TEST(SettingSet, DescribesTheKeysInTheOrderOfTheList) {
  const auto keys = SettingSet::known_keys();
  const auto list = SettingSet().list();
  ASSERT_EQ(keys.size(), list.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(keys[i].name, list[i].key);
    EXPECT_EQ(keys[i].fallback, list[i].value);
    EXPECT_EQ(keys[i].doc, list[i].note);
    EXPECT_NE(keys[i].doc.find(keys[i].accepts), std::string::npos);
    EXPECT_EQ(SettingSet::nearest(keys[i].name), keys[i].name);
  }
  const auto type = [&](const std::string& name) {
    return std::find_if(keys.begin(), keys.end(), [&](auto& k) { return k.name == name; })->type;
  };
  EXPECT_EQ(type("cap"), "bytes");
  EXPECT_EQ(type("mode"), "choice");
  EXPECT_EQ(type("background"), "bool");
  EXPECT_EQ(type("slack"), "float");
  EXPECT_EQ(type("hit_scan"), "int");
  EXPECT_EQ(type("max_fences"), "int");
}

// The table has its own limits, so that a mistake can be told as "what is accepted". Here they are
// held against those of Options::validate(): nothing that the core takes is refused at the limits.
TEST(SettingSet, AgreesWithTheCoreOnWhatIsInRange) {
  const struct {
    const char* key;
    double Options::* field;
    double inside[2];
    double outside[2];
  } cases[] = {
      {"slack", &Options::slack, {0, 1}, {-0.001, 1.001}},
      {"tight_from", &Options::tight_from, {0.001, 1}, {0, 1.001}},
      {"price", &Options::price, {0, 1e9}, {-0.001, -1}},
      {"price_pages", &Options::price_pages, {0, 1e9}, {-0.001, -1}},
      {"tight_price", &Options::tight_price, {0, 1e9}, {-0.001, -1}},
  };
  for (const auto& c : cases) {
    for (const bool inside : {true, false}) {
      for (const double value : inside ? c.inside : c.outside) {
        Options options;
        options.*c.field = value;
        EXPECT_EQ(!options.validate(), inside) << c.key << " " << value;
        EXPECT_EQ(!SettingSet().set(c.key, std::to_string(value), "test"), inside)
            << c.key << " " << value;
      }
    }
  }
}

TEST(SettingSet, TakesOnlyItsOwnKeysOutOfTorchsVariable) {
  SettingSet settings;
  EXPECT_EQ(
      settings.apply_torch_conf("max_split_size_mb:512,gpumemx_slack:0.01,"
                                "roundup_power2_divisions:[256:1,gpumemx_slack:1,>:4],slack:1,"
                                "nonsense, GPUMEMX_cap : 8GiB",
                                "PYTORCH_ALLOC_CONF"),
      std::nullopt);
  EXPECT_EQ(settings.core().slack, 0.01);
  EXPECT_EQ(settings.core().cap, 8_GiB);

  const Case cases[] = {
      {"gpumemx_slak:0.01",
       "PYTORCH_ALLOC_CONF: there is no setting 'gpumemx_slak'; the nearest name is "
       "'gpumemx_slack'"},
      {"gpumemx_cap=8GiB",
       "PYTORCH_ALLOC_CONF: 'gpumemx_cap=8GiB' has '=' in the place of ':'; "
       "write gpumemx_cap:8GiB"},
      {"backend:native,gpumemx_mode:fast",
       "PYTORCH_ALLOC_CONF: 'fast' is no value for gpumemx_mode, which takes virtual or plain"},
      {"gpumemx_expandable_segments:True",
       "PYTORCH_ALLOC_CONF: expandable_segments is a key of torch's, written without gpumemx_"},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(settings.apply_torch_conf(c.text, "PYTORCH_ALLOC_CONF"), c.outcome);
  }
}

TEST(SettingSet, SaysWhatBecomesOfTorchsKeys) {
  SettingSet settings;
  settings.note_torch("Expandable_Segments", "False", "PYTORCH_CUDA_ALLOC_CONF");
  settings.note_torch("per_process_memory_fraction", "0.5", "PYTORCH_ALLOC_CONF");
  settings.note_torch("pinned_use_background_threads", "True", "PYTORCH_ALLOC_CONF");
  settings.note_torch("graph_capture_record_stream_reuse", "True", "PYTORCH_ALLOC_CONF");
  settings.note_torch("from_the_future", "1", "PYTORCH_ALLOC_CONF");
  settings.note_torch("expandable_segments", "True", "PYTORCH_ALLOC_CONF");

  const auto list = settings.list();
  const auto torchs = list.begin() + static_cast<std::ptrdiff_t>(SettingSet::known_keys().size());
  ASSERT_EQ(list.end() - torchs, 5);
  EXPECT_EQ(torchs[0].key, "expandable_segments");  // where it was noted first
  EXPECT_EQ(torchs[0].value, "True");
  EXPECT_EQ(torchs[0].source, "PYTORCH_ALLOC_CONF");
  EXPECT_TRUE(torchs[0].note.starts_with("no work left: ")) << torchs[0].note;
  EXPECT_TRUE(torchs[1].note.starts_with("kept: ")) << torchs[1].note;
  EXPECT_TRUE(torchs[2].note.starts_with("torch's own: ")) << torchs[2].note;
  EXPECT_TRUE(torchs[3].note.starts_with("not in this version: ")) << torchs[3].note;
  EXPECT_TRUE(torchs[4].note.starts_with("unknown to gpumemx: ")) << torchs[4].note;
}

TEST(SettingSet, HasAWordForEveryKeyThatTorchDocuments) {
  for (const char* key :
       {"large_segment_size_mb", "max_split_size_mb", "max_non_split_rounding_mb",
        "garbage_collection_threshold", "roundup_power2_divisions", "expandable_segments",
        "pinned_use_background_threads", "backend", "release_lock_on_cudamalloc",
        "graph_capture_record_stream_reuse", "per_process_memory_fraction",
        "throw_on_cudamalloc_oom", "pinned_use_cuda_host_register", "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb", "pinned_free_catch_all", "expandable_segments_reserve",
        "expandable_segments_reserve_by_class"}) {
    SettingSet settings;
    settings.note_torch(key, "1", "PYTORCH_ALLOC_CONF");
    EXPECT_FALSE(settings.list().back().note.starts_with("unknown")) << key;
  }
}

TEST(SettingSet, FindsEnvironmentVariablesThatMeanNothing) {
  EXPECT_EQ(
      SettingSet::unknown_environment(
          {"PATH", "GPUMEMX_CONF", "GPUMEMX_DISABLE", "GPUMEMX_REQUIRE_GPU",
           "GPUMEMX_REQUIRE_BROWSER", "GPUMEMX_SEEDS", "GPUMEMX_OPS", "GPUMEMX_SEED",
           "GPUMEMX_ASAN_SEEDS", "GPUMEMX_ROUNDS", "GPUMEMX_FILES", "MY_GPUMEMX_X", "gpumemx_x"}),
      Words{});
  EXPECT_EQ(SettingSet::unknown_environment(
                {"GPUMEMX_CONFIG", "HOME", "GPUMEMX_CAP", "GPUMEMX_DISABLED"}),
            (Words{"environment variable GPUMEMX_CONFIG means nothing to gpumemx; the nearest name "
                   "is GPUMEMX_CONF",
                   "environment variable GPUMEMX_CAP means nothing to gpumemx; write "
                   "GPUMEMX_CONF=cap:none (that is its default)",
                   "environment variable GPUMEMX_DISABLED means nothing to gpumemx; the nearest "
                   "name is GPUMEMX_DISABLE"}));
}

TEST(SettingSet, FindsTheNearestKey) {
  const Case cases[] = {
      {"slak", "slack"},
      {"salck", "slack"},
      {"Slack", "slack"},
      {"maxaliases", "max_aliases"},
      {"gpumemx_pric", "price"},
      {"price_page", "price_pages"},
      {"rest_handel_max", "rest_handle_max"},
      {"hitwaste", "hit_waste"},
      {"", "cap"},
  };
  for (const Case& c : cases) EXPECT_EQ(SettingSet::nearest(c.text), c.outcome) << c.text;
}

TEST(SplitConf, KeepsBracketListsWhole) {
  EXPECT_EQ(words(split_conf("")), Words{});
  EXPECT_EQ(words(split_conf(" , ,")), Words{});
  EXPECT_EQ(words(split_conf("backend:native")), Words{"backend:native"});
  EXPECT_EQ(
      words(split_conf("roundup_power2_divisions:[256:1, 512:2,>:4], max_split_size_mb : 512,")),
      (Words{"roundup_power2_divisions:[256:1,512:2,>:4]", "max_split_size_mb:512"}));
  EXPECT_EQ(words(split_conf("a:[1,2],b=3,c,d:e:f=g")), (Words{"a:[1,2]", "b=3", "c!", "d:e:f=g"}));
  EXPECT_EQ(words(split_conf("a:1],b:[2,c:3")), (Words{"a:1]", "b:[2,c:3"}));  // brackets that lack
}

}  // namespace
}  // namespace gpumemx
