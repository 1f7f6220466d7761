// SPDX-License-Identifier: BSD-3-Clause
//
// Making gpumemx torch's CUDA allocator, and what it is set to.
#pragma once

#include <gpumemx/export.hpp>
#include <initializer_list>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gpumemx {

/// The value of a setting: text, a number or a truth value. Sizes are bytes, or text such as "20GiB".
class SettingValue {
 public:
  /// Text, as it would be written in GPUMEMX_CONF.
  SettingValue(std::string text) : text_(std::move(text)) {}
  /// The same.
  SettingValue(const char* text) : text_(text) {}
  /// A truth value.
  SettingValue(bool value) : text_(value ? "true" : "false") {}
  /// Any number.
  template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
  SettingValue(Number number) {
    std::ostringstream text;
    text.precision(15);
    text << number;
    text_ = text.str();
  }

  /// As it would be written in GPUMEMX_CONF.
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

/// What a program sets itself. It wins over GPUMEMX_CONF, and that over torch's own variable
/// PYTORCH_ALLOC_CONF, where the keys are written gpumemx_<key>.
///
/// @code
/// gpumemx::install_allocator({{"cap", "20GiB"}, {"background", false}});
/// @endcode
///
/// What can be set: settings() lists it with values and meanings, once gpumemx is installed.
struct Settings {
  Settings() = default;
  /// Keys and their values; of equal keys the last counts.
  Settings(std::initializer_list<std::pair<std::string, SettingValue>> pairs)
      : values(pairs.begin(), pairs.end()) {}

  /// Adds one; of equal keys the last counts.
  Settings& set(std::string key, SettingValue value) {
    values.emplace_back(std::move(key), std::move(value));
    return *this;
  }

  /// Keys and their values.
  std::vector<std::pair<std::string, SettingValue>> values;
  /// Install also when CUDA has started: new memory comes from gpumemx, blocks that exist stay with
  /// torch's own allocator until they are freed, and cached memory of it stays there.
  bool late = false;
};

/// Makes gpumemx the allocator of CUDA memory for torch, for the life of the process.
///
/// Call it first in main(), before the first CUDA tensor and while no other thread uses CUDA. Starts
/// no CUDA, unless it is late. A second call is fine when what it sets is in force already. With
/// GPUMEMX_DISABLE=1 in the environment it does nothing and says so on stderr: torch keeps its own
/// allocator, and all other functions work on that.
///
/// @throws SettingError see there.
/// @throws InstallError CUDA has started and Settings::late is false; torch has no CUDA, runs on another
///   allocator or is of another release than this library was built for; or gpumemx is installed with
///   other settings than these.
GPUMEMX_API void install_allocator(const Settings& settings = {});

/// Whether gpumemx is torch's CUDA allocator in this process, installed by this library or by the
/// Python package.
GPUMEMX_API bool is_installed();

/// One setting and where its value is from.
struct Setting {
  std::string key;     ///< Its name.
  std::string value;   ///< As it would be written in GPUMEMX_CONF.
  std::string source;  ///< "default", "GPUMEMX_CONF", "install_allocator()", or torch's variable.
  std::string note;    ///< What it means and accepts; of a key of torch's, what becomes of it.
};

/// What is in force: gpumemx's own settings in a fixed order, then those of torch's keys that are set.
/// Before the installation, what would be: from the environment.
///
/// @throws SettingError before the installation: the environment has a mistake.
GPUMEMX_API std::vector<Setting> settings();

}  // namespace gpumemx
