// SPDX-License-Identifier: BSD-3-Clause
//
// Reads a pickle of protocol 2 to 5 that holds plain data: dict, list, tuple, set, str, int, float,
// bool, None, bytes. Nothing in it is ever imported or called; a file that wants that is refused, and
// the error names what it asks for. No tree of objects is built: lists and dicts are the builder's,
// which sees their content once, innermost first, and keeps what it needs of it.
//
// Bounded: nothing is allocated for what a length claims, and nothing recurses with the input. The
// memory beside the builder's is 8 bytes for each memo slot and each value on the stack.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.hpp"
#include "replay/pickle_input.hpp"

namespace gpumemx {

// A value in 8 bytes. What does not fit is by number: of a text or a number in PickleConstants, of a
// list, dict or tuple in the builder.
class PickleValue {
 public:
  enum class Kind : std::uint8_t {
    kUnset,  // no value: an empty memo slot
    kNone,
    kBool,
    kInt,      // fits in 60 bits
    kWideInt,  // by number, 64 bits
    kHugeInt,  // does not fit in 64 bits; not kept
    kFloat,    // by number
    kText,     // by number
    kBytes,    // not kept
    kTuple,    // the next three: the builder's own numbers
    kList,
    kDict,
  };

  constexpr PickleValue() = default;
  constexpr PickleValue(Kind kind, std::int64_t payload = 0)
      : bits_((static_cast<std::uint64_t>(payload) << kKindBits) |
              static_cast<std::uint64_t>(kind)) {}

  constexpr Kind kind() const { return static_cast<Kind>(bits_ & ((1u << kKindBits) - 1)); }
  constexpr bool is(Kind kind) const { return this->kind() == kind; }
  constexpr std::int64_t payload() const { return static_cast<std::int64_t>(bits_) >> kKindBits; }
  constexpr std::size_t number() const { return static_cast<std::size_t>(payload()); }
  constexpr std::uint32_t text() const { return static_cast<std::uint32_t>(payload()); }

  static constexpr bool fits(std::int64_t n) { return n >= -(1ll << 59) && n < (1ll << 59); }

 private:
  static constexpr int kKindBits = 4;
  std::uint64_t bits_ = 0;
};

// "an int", "a list": for messages.
const char* to_string(PickleValue::Kind kind);

// Each different text once, in the order of its first use.
class TextTable {
 public:
  TextTable() = default;
  TextTable(TextTable&&) = default;  // not copied: the views are of its own storage
  TextTable& operator=(TextTable&&) = default;

  std::uint32_t number(std::string_view text);
  std::string_view operator[](std::uint32_t number) const { return texts_[number]; }
  std::size_t size() const { return texts_.size(); }

 private:
  std::string_view keep(std::string_view text);

  std::unordered_map<std::string_view, std::uint32_t> numbers_;
  std::vector<std::string_view> texts_;
  std::vector<std::vector<char>> storage_;  // pages that never move
};

struct PickleConstants {
  TextTable texts;
  std::vector<std::int64_t> wide;
  std::vector<double> floats;

  PickleValue make_int(std::int64_t n);
  std::optional<std::int64_t> as_int(PickleValue value) const;  // also a bool, as in Python
};

// What the lists and dicts of a pickle become. A mistake is returned as one sentence without the
// place, which the reader adds.
class PickleBuilder {
 public:
  using Mistake = std::optional<std::string>;

  virtual ~PickleBuilder() = default;
  virtual PickleValue new_list() = 0;
  virtual PickleValue new_dict() = 0;
  virtual PickleValue new_tuple(std::span<const PickleValue> items) = 0;
  virtual Mistake extend(PickleValue list, std::span<const PickleValue> items) = 0;
  // Keys and values in turn. REQUIRES: an even number.
  virtual Mistake set_items(PickleValue dict, std::span<const PickleValue> items) = 0;
};

// Called with the bytes read and the bytes in all, now and then and at the end. May throw: that ends
// the reading.
using ReadProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

// The value that the pickle is of. Fails: kInvalidArgument, with what is wrong, at which byte, and
// what to do.
Result<PickleValue> read_pickle(PickleInput& input, PickleConstants& constants,
                                PickleBuilder& builder, const ReadProgress& progress = {});

}  // namespace gpumemx
