// SPDX-License-Identifier: BSD-3-Clause
//
// Types for the quantities an allocator must never mix up: how many bytes, where, and on which
// stream. A bare integer of one of these kinds never crosses a function boundary in csrc/.
#pragma once

#include <compare>
#include <cstdint>

namespace gpumemx {

struct Bytes {
  std::uint64_t n = 0;

  friend constexpr auto operator<=>(Bytes, Bytes) = default;
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return {a.n + b.n}; }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return {a.n - b.n}; }  // REQUIRES: a >= b
  friend constexpr Bytes operator*(Bytes a, std::uint64_t k) { return {a.n * k}; }
  constexpr Bytes& operator+=(Bytes b) {
    n += b.n;
    return *this;
  }
  constexpr Bytes& operator-=(Bytes b) {  // REQUIRES: *this >= b
    n -= b.n;
    return *this;
  }
};

inline namespace literals {
constexpr Bytes operator""_B(unsigned long long n) { return {n}; }
constexpr Bytes operator""_KiB(unsigned long long n) { return {n << 10}; }
constexpr Bytes operator""_MiB(unsigned long long n) { return {n << 20}; }
constexpr Bytes operator""_GiB(unsigned long long n) { return {n << 30}; }
constexpr Bytes operator""_TiB(unsigned long long n) { return {n << 40}; }
}  // namespace literals

// REQUIRES: step is not zero.
constexpr Bytes round_up(Bytes size, Bytes step) {
  return {(size.n + step.n - 1) / step.n * step.n};
}
constexpr Bytes round_down(Bytes size, Bytes step) { return {size.n / step.n * step.n}; }

struct DeviceAddr {
  std::uint64_t n = 0;

  friend constexpr auto operator<=>(DeviceAddr, DeviceAddr) = default;
  friend constexpr DeviceAddr operator+(DeviceAddr a, Bytes b) { return {a.n + b.n}; }
  friend constexpr DeviceAddr operator-(DeviceAddr a, Bytes b) { return {a.n - b.n}; }
  friend constexpr Bytes operator-(DeviceAddr hi, DeviceAddr lo) { return {hi.n - lo.n}; }
};

// The half-open range [begin, begin + size).
struct AddrRange {
  DeviceAddr begin;
  Bytes size;

  friend constexpr bool operator==(AddrRange, AddrRange) = default;
  constexpr DeviceAddr end() const { return begin + size; }
  constexpr bool contains(DeviceAddr a) const { return begin <= a && a < end(); }
  constexpr bool overlaps(AddrRange o) const { return begin < o.end() && o.begin < end(); }
};

// Identity of a stream: given once, never to another stream, also after the stream is destroyed.
enum class StreamId : std::uint64_t {};

// How a driver call names a stream. `native` is the driver's own value (CUstream); after the stream
// is destroyed it can come back for another stream, which then has another id.
struct StreamRef {
  StreamId id{};
  std::uint64_t native = 0;
  int device = -1;  // whose stream, where that is another device than the one that is called

  friend constexpr bool operator==(StreamRef a, StreamRef b) { return a.id == b.id; }
};

enum class HandleId : std::uint64_t {};  // physical memory, wherever it stands; 0 is none
enum class EventId : std::uint64_t {};   // a point in a stream's work; 0 is none

}  // namespace gpumemx
