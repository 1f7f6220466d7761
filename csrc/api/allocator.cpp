// SPDX-License-Identifier: BSD-3-Clause
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <gpumemx/allocator.hpp>
#include <gpumemx/errors.hpp>
#include <gpumemx/version.hpp>
#include <mutex>
#include <string_view>

#include "adapter/install.hpp"
#include "base/version.hpp"
#include "runtime/setting_set.hpp"
#include "runtime/setting_table.hpp"

namespace gpumemx {

namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool is_disabled() {
  const std::string value = plain_word(environment("GPUMEMX_DISABLE"));
  for (const char* no : {"", "0", "false", "off", "no"}) {
    if (value == no) return false;
  }
  const bool yes = value == "1" || value == "true" || value == "on" || value == "yes";
  if (!yes) throw SettingError("GPUMEMX_DISABLE: '" + value + "' is neither 1 nor 0");
  static std::once_flag once;
  std::call_once(once, [] {
    std::fputs("gpumemx: GPUMEMX_DISABLE is set: torch keeps its own CUDA allocator\n", stderr);
  });
  return true;
}

// A misspelled variable would be passed over in silence.
void check_environment() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    names.emplace_back(text.substr(0, text.find('=')));
  }
  std::string text;
  for (const std::string& sentence : SettingSet::unknown_environment(names)) {
    text += (text.empty() ? "" : "; ") + sentence;
  }
  if (!text.empty()) throw SettingError(text);
}

std::vector<ConfPair> arguments_of(const Settings& settings) {
  std::vector<ConfPair> pairs;
  for (const auto& [key, value] : settings.values) pairs.push_back({key, value.text()});
  return pairs;
}

// Without torch's variables, which adapter::install() puts below these.
SettingSet given(const Settings& settings) {
  SettingSet set;
  if (auto wrong = set.apply(environment("GPUMEMX_CONF"), SettingSet::kConfSource)) {
    throw SettingError(*wrong);
  }
  if (auto wrong = set.set_all(arguments_of(settings), SettingSet::kArgumentSource)) {
    throw SettingError(*wrong);
  }
  return set;
}

void check_same(const Settings& settings) {
  const SettingSet wanted = given(settings);
  const auto there = adapter::settings_in_force();
  for (const SettingSet::Entry& entry : wanted.list()) {
    if (entry.source != SettingSet::kArgumentSource) continue;
    for (const SettingSet::Entry& now : there) {
      if (now.key != entry.key || now.value == entry.value) continue;
      throw InstallError(
          "gpumemx is installed already with " + now.key + ":" + now.value + " (from " +
          now.source + "), and settings cannot change while a process runs; " + entry.key + ":" +
          entry.value + " has to be given to the first install_allocator() or in GPUMEMX_CONF");
    }
  }
}

std::vector<Setting> to_public(const std::vector<SettingSet::Entry>& entries) {
  std::vector<Setting> out;
  for (const SettingSet::Entry& e : entries) out.push_back({e.key, e.value, e.source, e.note});
  return out;
}

}  // namespace

const char* version() noexcept { return build::kVersion; }

void install_allocator(const Settings& settings) {
  if (is_disabled()) return;
  check_environment();
  if (adapter::installed() != nullptr) return check_same(settings);
  if (adapter::is_installed_by_anyone()) {
    if (settings.values.empty()) return;
    throw InstallError(
        "gpumemx is installed already, by Python or by another copy of this library: its settings "
        "have to be given there, or in GPUMEMX_CONF");
  }
  adapter::InstallRequest request;
  request.settings = given(settings);
  request.late = settings.late;
  const auto wrong = adapter::install(std::move(request));
  if (!wrong) return;
  switch (wrong->kind) {
    case adapter::InstallFailure::kSetting: throw SettingError(wrong->text);
    case adapter::InstallFailure::kTooLate:
      throw InstallError(
          wrong->text +
          " in this process. Call gpumemx::install_allocator() first in main(), before the first "
          "CUDA tensor; or set Settings::late: new memory then comes from gpumemx, and what exists "
          "stays with torch's allocator");
    case adapter::InstallFailure::kImpossible:
      throw InstallError("gpumemx cannot be installed: " + wrong->text);
  }
}

bool is_installed() { return adapter::is_installed_by_anyone(); }

std::vector<Setting> settings() {
  if (adapter::installed() != nullptr) return to_public(adapter::settings_in_force());
  SettingSet set;
  if (auto wrong = set.gather(environment("GPUMEMX_CONF"), {})) throw SettingError(*wrong);
  return to_public(set.list());
}

}  // namespace gpumemx
