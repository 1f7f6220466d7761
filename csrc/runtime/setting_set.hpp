// SPDX-License-Identifier: BSD-3-Clause
//
// All that a user can set, each with its value and where it came from. The core's Options come out.
//
// Four sources, lowest first: the defaults, torch's own variable (there our keys are written
// gpumemx_<key>), GPUMEMX_CONF, the arguments of install_allocator(). A later call wins, so the
// caller applies them in that order; each text has to make sense on top of what was applied before.
// The texts read "key:value,key:value": spaces, the case of keys and words, an empty item and a
// trailing comma do not matter, and the last of two equal keys counts.
//
// A mistake is never passed over: it is one sentence that begins with the source, and then nothing
// of that text is applied. Not thread-safe: a value, filled before the allocator is installed.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/options.hpp"

namespace gpumemx {

struct ConfPair {
  std::string key;
  std::string value;
  char separator = ':';  // '=' where the text has that mistake, '\0' where the item has neither
};

// The items of a text in the form of PYTORCH_ALLOC_CONF, without white space. A comma inside
// brackets does not end a value: "roundup_power2_divisions:[256:1,>:4]" is one pair.
std::vector<ConfPair> split_conf(std::string_view text);

class SettingSet {
 public:
  static constexpr std::string_view kTorchPrefix = "gpumemx_";
  static constexpr std::string_view kDefaultSource = "default";
  static constexpr std::string_view kConfSource = "GPUMEMX_CONF";
  static constexpr std::string_view kArgumentSource = "install_allocator()";

  struct Key {
    std::string name;
    std::string type;      // bytes, int, float, bool or choice
    std::string fallback;  // its default, as it would be written
    std::string accepts;   // "a number from 0 to 1"
    std::string doc;       // one sentence: meaning, unit and what is accepted
  };
  struct Entry {
    std::string key;
    std::string value;   // can be given back to apply()
    std::string source;  // kDefaultSource, or what the caller named
    std::string note;    // of ours: Key::doc; of torch's: what becomes of it under gpumemx
  };

  // The core's defaults, with a background thread.
  static Options defaults();
  SettingSet();

  // --- each returns the first mistake in words, or nothing
  std::optional<std::string> apply(std::string_view text, std::string_view source);
  // Takes the keys with kTorchPrefix out of torch's variable; the others are torch's to judge.
  std::optional<std::string> apply_torch_conf(std::string_view text, std::string_view source);
  std::optional<std::string> set(std::string_view key, std::string_view value,
                                 std::string_view source);
  // Several at once, so that their order does not matter to limits that belong together.
  std::optional<std::string> set_all(const std::vector<ConfPair>& pairs, std::string_view source);
  // Puts what `higher` has that is not a default over this, each with its source, all at once.
  std::optional<std::string> overlay(const SettingSet& higher);

  // What PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF of the environment say: our keys are applied,
  // torch's are noted.
  std::optional<std::string> apply_torch_environment();
  // All sources, over the defaults: torch's variables, the text of GPUMEMX_CONF, the arguments.
  // REQUIRES: nothing was applied yet.
  std::optional<std::string> gather(std::string_view conf, const std::vector<ConfPair>& arguments);

  // A key of torch's that was found set, for list(). The last note for a key counts.
  void note_torch(std::string_view key, std::string_view value, std::string_view source);

  const Options& core() const { return options_; }
  std::vector<Entry> list() const;  // our keys in the order of known_keys(), then torch's

  static std::vector<Key> known_keys();
  // The known key that takes the fewest edits to reach, whatever their number.
  static std::string nearest(std::string_view key);
  // One sentence for each of `names`, the names of environment variables, that starts with GPUMEMX_
  // and means nothing. The variables that only gpumemx's tests read are allowed.
  static std::vector<std::string> unknown_environment(const std::vector<std::string>& names);

 private:
  std::optional<std::string> assign(const std::vector<ConfPair>& pairs, std::string_view source,
                                    std::string_view prefix);
  std::string named_in(std::string_view sentence) const;

  Options options_;
  std::vector<std::string> sources_;  // of each key, in the order of the table
  std::vector<Entry> torch_;
};

}  // namespace gpumemx
