// SPDX-License-Identifier: BSD-3-Clause
//
// Errors below the adapter are values. One code per thing a caller can do differently; the text
// carries the rest. Never thrown: an allocator is called where nothing may be thrown.
#pragma once

#include <string>
#include <utility>
#include <variant>

#include "base/units.hpp"

namespace gpumemx {

enum class Errc {
  kOutOfMemory,        // the device refused; free something and try again
  kOutOfAddressSpace,  // no addresses left; retrying does not help
  kUnsupported,        // the traits of this device said so
  kCaptureActive,      // not while this stream captures; nothing happened, try after the capture
  kShuttingDown,       // the driver is going away; give up quietly
  kInvalidArgument,    // our bug or the caller's
  kDriverFailure,      // the driver broke its contract; the context may be unusable
};

const char* to_string(Errc code);

struct Error {
  Errc code;
  Bytes requested;    // zero when no size is involved
  std::string where;  // the call and what the driver said, for people
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: implicit
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit

  bool ok() const { return state_.index() == 0; }
  const T& value() const { return *std::get_if<0>(&state_); }      // REQUIRES: ok()
  T take() && { return std::move(*std::get_if<0>(&state_)); }      // REQUIRES: ok()
  const Error& error() const { return *std::get_if<1>(&state_); }  // REQUIRES: !ok()

 private:
  std::variant<T, Error> state_;
};

using Status = Result<std::monostate>;
inline Status ok_status() { return Status(std::monostate{}); }

}  // namespace gpumemx
