// SPDX-License-Identifier: BSD-3-Clause
#include "runtime/setting_set.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <span>
#include <utility>

#include "runtime/setting_table.hpp"
#include "runtime/torch_keys.hpp"

namespace gpumemx {
namespace {

std::string doc(const SettingRow& row) {
  return std::string(row.meaning) + ": " + accepted_values(row) + ".";
}

// --- names

std::size_t edits(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);  // from the a read so far to each prefix of b
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replace = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replace, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// REQUIRES: names is not empty.
std::string_view nearest_of(std::string_view name, std::span<const std::string_view> names) {
  return *std::min_element(names.begin(), names.end(),
                           [&](auto a, auto b) { return edits(name, a) < edits(name, b); });
}

// --- environment variables

constexpr std::string_view kEnvironmentPrefix = "GPUMEMX_";
constexpr std::array<std::string_view, 2> kEnvironment{"GPUMEMX_CONF", "GPUMEMX_DISABLE"};
constexpr std::array<std::string_view, 10> kTestEnvironment{
    "GPUMEMX_REQUIRE_GPU", "GPUMEMX_REQUIRE_TORCH", "GPUMEMX_REQUIRE_BROWSER",
    "GPUMEMX_TEST_NATIVE", "GPUMEMX_SEEDS",         "GPUMEMX_OPS",
    "GPUMEMX_SEED",        "GPUMEMX_ASAN_SEEDS",    "GPUMEMX_ROUNDS",
    "GPUMEMX_FILES"};

template <class Names>
bool contains(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

std::vector<ConfPair> split_conf(std::string_view text) {
  std::vector<ConfPair> pairs;
  ConfPair pair{.key = {}, .value = {}, .separator = '\0'};
  int depth = 0;
  const auto end_item = [&] {
    if (!pair.key.empty() || pair.separator != '\0') pairs.push_back(pair);
    pair = {.key = {}, .value = {}, .separator = '\0'};
  };
  for (const char c : text) {
    if (is_space(c)) continue;
    if (c == ',' && depth == 0) {
      end_item();
    } else if (pair.separator == '\0' && (c == ':' || c == '=')) {
      pair.separator = c;
    } else {
      if (c == '[') ++depth;
      if (c == ']' && depth > 0) --depth;
      (pair.separator == '\0' ? pair.key : pair.value) += c;
    }
  }
  end_item();
  return pairs;
}

Options SettingSet::defaults() {
  Options options;
  options.background = true;  // there is a thread for it (runtime/background.hpp)
  return options;
}

SettingSet::SettingSet()
    : options_(defaults()), sources_(setting_rows().size(), std::string(kDefaultSource)) {}

std::optional<std::string> SettingSet::apply(std::string_view text, std::string_view source) {
  return assign(split_conf(text), source, "");
}

std::optional<std::string> SettingSet::apply_torch_conf(std::string_view text,
                                                        std::string_view source) {
  std::vector<ConfPair> own;
  for (ConfPair& pair : split_conf(text)) {
    if (!plain_word(pair.key).starts_with(kTorchPrefix)) continue;
    pair.key.erase(0, kTorchPrefix.size());
    own.push_back(std::move(pair));
  }
  return assign(own, source, kTorchPrefix);
}

std::optional<std::string> SettingSet::set(std::string_view key, std::string_view value,
                                           std::string_view source) {
  return set_all({{.key = std::string(key), .value = std::string(value)}}, source);
}

std::optional<std::string> SettingSet::set_all(const std::vector<ConfPair>& pairs,
                                               std::string_view source) {
  return assign(pairs, source, "");
}

// Works on a copy, so that a text with a mistake leaves nothing behind. `prefix` is what the user
// wrote before our names.
std::optional<std::string> SettingSet::assign(const std::vector<ConfPair>& pairs,
                                              std::string_view source, std::string_view prefix) {
  const std::string from = std::string(source) + ": ";
  const std::string before(prefix);
  SettingSet next = *this;
  for (const ConfPair& pair : pairs) {
    const std::string key = plain_word(pair.key);
    const std::string shown = before + key;
    const std::optional<std::size_t> index = find_setting(key);
    if (!index) {
      if (const auto note = torch_note(key)) {
        if (!prefix.empty()) return from + key + " is a key of torch's, written without " + before;
        return from + key +
               " is a key of torch's, for PYTORCH_ALLOC_CONF; under gpumemx: " + std::string(*note);
      }
      return from + "there is no setting '" + shown + "'; the nearest name is '" + before +
             nearest(key) + "'";
    }
    const SettingRow& row = setting_rows()[*index];
    if (pair.separator == '=') {
      return from + "'" + shown + "=" + pair.value + "' has '=' in the place of ':'; write " +
             shown + ":" + pair.value;
    }
    if (pair.separator == '\0') {
      return from + shown + " has no value; write " + shown + ": and " + accepted_values(row);
    }
    if (!set_value(row, pair.value, next.options_)) {
      return from + "'" + pair.value + "' is no value for " + shown + ", which takes " +
             accepted_values(row);
    }
    next.sources_[*index] = source;
  }
  if (const std::optional<std::string> broken = next.options_.validate()) {
    return from + *broken + next.named_in(*broken);
  }
  *this = std::move(next);
  return std::nullopt;
}

std::optional<std::string> SettingSet::overlay(const SettingSet& higher) {
  SettingSet next = *this;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (higher.sources_[i] == kDefaultSource) continue;
    const SettingRow& row = setting_rows()[i];
    set_value(row, value_text(row, higher.options_), next.options_);
    next.sources_[i] = higher.sources_[i];
  }
  for (const Entry& noted : higher.torch_) next.note_torch(noted.key, noted.value, noted.source);
  if (const std::optional<std::string> broken = next.options_.validate()) {
    return *broken + next.named_in(*broken);
  }
  *this = std::move(next);
  return std::nullopt;
}

std::optional<std::string> SettingSet::apply_torch_environment() {
  // Lower precedence first. torch's generic parser prefers the first name, its CUDA parser the
  // second, so where both are set our keys may stand in either.
  for (const char* name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    const char* text = std::getenv(name);
    if (text == nullptr) continue;
    if (auto wrong = apply_torch_conf(text, name)) return wrong;
    for (const ConfPair& pair : split_conf(text)) {
      if (pair.key.starts_with(kTorchPrefix)) continue;
      note_torch(pair.key, pair.value, name);
    }
  }
  return std::nullopt;
}

std::optional<std::string> SettingSet::gather(std::string_view conf,
                                              const std::vector<ConfPair>& arguments) {
  SettingSet own;
  if (auto wrong = own.apply(conf, kConfSource)) return wrong;
  if (auto wrong = own.set_all(arguments, kArgumentSource)) return wrong;
  if (auto wrong = apply_torch_environment()) return wrong;
  return overlay(own);
}

// What a sentence of Options::validate() is about: " (rest_handle is 64MiB from GPUMEMX_CONF)".
std::string SettingSet::named_in(std::string_view sentence) const {
  std::string text;
  for (std::size_t i = 0; i < setting_rows().size(); ++i) {
    if (sentence.find(setting_rows()[i].name) == sentence.npos) continue;
    text += text.empty() ? " (" : ", ";
    text += std::string(setting_rows()[i].name) + " is " + value_text(setting_rows()[i], options_);
    text += sources_[i] == kDefaultSource ? " by default" : " from " + sources_[i];
  }
  return text.empty() ? text : text + ")";
}

void SettingSet::note_torch(std::string_view key, std::string_view value, std::string_view source) {
  Entry entry{.key = plain_word(key),
              .value = std::string(value),
              .source = std::string(source),
              .note = {}};
  entry.note =
      torch_note(entry.key).value_or("unknown to gpumemx: torch alone knows what it does.");
  const auto same = std::find_if(torch_.begin(), torch_.end(),
                                 [&](const Entry& noted) { return noted.key == entry.key; });
  if (same == torch_.end()) {
    torch_.push_back(std::move(entry));
  } else {
    *same = std::move(entry);
  }
}

std::vector<SettingSet::Entry> SettingSet::list() const {
  std::vector<Entry> entries;
  for (std::size_t i = 0; i < setting_rows().size(); ++i) {
    entries.push_back({.key = std::string(setting_rows()[i].name),
                       .value = value_text(setting_rows()[i], options_),
                       .source = sources_[i],
                       .note = doc(setting_rows()[i])});
  }
  entries.insert(entries.end(), torch_.begin(), torch_.end());
  return entries;
}

std::vector<SettingSet::Key> SettingSet::known_keys() {
  std::vector<Key> keys;
  for (const SettingRow& row : setting_rows()) {
    keys.push_back({.name = std::string(row.name),
                    .type = type_name(row),
                    .fallback = value_text(row, defaults()),
                    .accepts = accepted_values(row),
                    .doc = doc(row)});
  }
  return keys;
}

std::string SettingSet::nearest(std::string_view key) {
  const std::string word = plain_word(key);
  std::string_view name = word;
  if (name.starts_with(kTorchPrefix)) name.remove_prefix(kTorchPrefix.size());
  std::vector<std::string_view> names;
  for (const SettingRow& row : setting_rows()) names.push_back(row.name);
  return std::string(nearest_of(name, names));
}

std::vector<std::string> SettingSet::unknown_environment(const std::vector<std::string>& names) {
  std::vector<std::string> sentences;
  for (const std::string& name : names) {
    if (!name.starts_with(kEnvironmentPrefix)) continue;
    if (contains(kEnvironment, name) || contains(kTestEnvironment, name)) continue;
    const std::string key = plain_word(std::string_view(name).substr(kEnvironmentPrefix.size()));
    std::string sentence = "environment variable " + name + " means nothing to gpumemx; ";
    if (const auto index = find_setting(key)) {
      sentence += "write GPUMEMX_CONF=" + key + ":" +
                  value_text(setting_rows()[*index], defaults()) + " (that is its default)";
    } else {
      sentence += "the nearest name is " + std::string(nearest_of(name, kEnvironment));
    }
    sentences.push_back(std::move(sentence));
  }
  return sentences;
}

}  // namespace gpumemx
