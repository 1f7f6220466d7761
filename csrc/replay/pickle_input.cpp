// SPDX-License-Identifier: BSD-3-Clause
#include "replay/pickle_input.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace gpumemx {

namespace {

// Large enough that the calls cost nothing, small enough to stay in the cache.
constexpr std::size_t kBuffer = std::size_t{1} << 20;

std::string system_text(int error) { return std::generic_category().message(error); }

}  // namespace

PickleInput::PickleInput(std::span<const std::byte> bytes)
    : window_(reinterpret_cast<const char*>(bytes.data()), bytes.size()), total_(bytes.size()) {}

Result<PickleInput> PickleInput::open(const std::string& path) {
  const auto refused = [](std::string why) {
    return Error{Errc::kInvalidArgument, {}, std::move(why)};
  };
  // Without O_NONBLOCK a named pipe that nobody writes to would be waited for.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return refused(system_text(errno));
  PickleInput input;
  input.file_ = file;
  struct stat facts{};
  if (::fstat(file, &facts) != 0) return refused(system_text(errno));
  if (S_ISDIR(facts.st_mode)) return refused(system_text(EISDIR));
  if (!S_ISREG(facts.st_mode)) return refused("not a regular file: copy it to one first");
  input.total_ = static_cast<std::uint64_t>(facts.st_size);
  input.buffer_.resize(std::min<std::uint64_t>(kBuffer, std::max<std::uint64_t>(input.total_, 1)));
  return Result<PickleInput>(std::move(input));
}

PickleInput::PickleInput(PickleInput&& other) noexcept
    : window_(other.window_),  // of a buffer that moves as a whole, or borrowed
      at_(other.at_),
      base_(other.base_),
      total_(other.total_),
      buffer_(std::move(other.buffer_)),
      file_(std::exchange(other.file_, -1)),
      failure_(std::move(other.failure_)) {}

PickleInput::~PickleInput() {
  if (file_ >= 0) ::close(file_);
}

bool PickleInput::refill(std::size_t n) {
  if (file_ < 0 || n > left()) return false;
  // What is left of the window goes to the front; take() asks for at most kMaxPiece, so it fits.
  std::size_t kept = window_.size() - at_;
  std::copy_n(window_.data() + at_, kept, buffer_.data());
  base_ += at_;
  at_ = 0;
  while (kept < n) {
    const ssize_t got = ::read(file_, buffer_.data() + kept, buffer_.size() - kept);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      failure_ = got < 0 ? system_text(errno) : "the file became shorter while it was read";
      break;
    }
    kept += static_cast<std::size_t>(got);
  }
  window_ = {buffer_.data(), kept};
  return kept >= n;
}

bool PickleInput::take_line(std::string& line) {
  line.clear();
  for (std::string_view c = take(1); !c.empty(); c = take(1)) {
    if (c[0] == '\n') return true;
    if (line.size() == kMaxLine) return false;
    line += c[0];
  }
  return false;
}

bool PickleInput::skip(std::uint64_t n) {
  if (n > left()) return false;
  while (n > 0) {
    const auto piece = static_cast<std::size_t>(std::min<std::uint64_t>(n, kMaxPiece));
    if (take(piece).empty()) return false;
    n -= piece;
  }
  return true;
}

}  // namespace gpumemx
