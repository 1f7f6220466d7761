// SPDX-License-Identifier: BSD-3-Clause
#include "replay/pickle.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "replay/paged_vector.hpp"

namespace gpumemx {

namespace {

using Kind = PickleValue::Kind;

// Values that may wait on the stack. torch's own writer puts a whole list there before it is one, so
// this is 134 million trace entries, in 1 GiB.
constexpr std::size_t kMaxStack = std::size_t{1} << 27;
// Bytes kept of one text: far above any path or annotation.
constexpr std::size_t kMaxText = PickleInput::kMaxPiece;
constexpr std::size_t kMaxTexts = std::size_t{1} << 24;  // different ones
constexpr std::uint64_t kProgressStep = std::uint64_t{8} << 20;

constexpr char kWriteAgain[] = "write it again, with torch.cuda.memory._dump_snapshot()";

enum Op : unsigned char {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kDup = '2',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinString = 'T',
  kShortBinString = 'U',
  kBinUnicode = 'X',
  kAppend = 'a',
  kDict = 'd',
  kEmptyDict = '}',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kList = 'l',
  kEmptyList = ']',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kEmptyTuple = ')',
  kSetItems = 'u',
  kBinFloat = 'G',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kProto = 0x80,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kMemoize = 0x94,
  kFrame = 0x95,
  kByteArray8 = 0x96,
  // What asks for code, or for something outside of the file.
  kGlobal = 'c',
  kStackGlobal = 0x93,
  kInst = 'i',
  kObj = 'o',
  kReduce = 'R',
  kBuild = 'b',
  kNewObj = 0x81,
  kNewObjEx = 0x92,
  kExt1 = 0x82,
  kExt2 = 0x83,
  kExt4 = 0x84,
  kPersId = 'P',
  kBinPersId = 'Q',
  kNextBuffer = 0x97,
  kReadOnlyBuffer = 0x98,
};

// Little-endian, as everything in a pickle but the floats.
template <class T>
T little(std::string_view bytes) {
  T n = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) {
    n = static_cast<T>(n << 8) | static_cast<unsigned char>(bytes[i]);
  }
  return n;
}

// A name from the file in a message: short, on one line, and nothing that a terminal would obey.
std::string printable(std::string_view name) {
  constexpr std::size_t kMost = 60;
  std::string text(name.substr(0, kMost));
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  return name.size() > kMost ? text + "..." : text;
}

class Interpreter {
 public:
  Interpreter(PickleInput& input, PickleConstants& constants, PickleBuilder& builder,
              const ReadProgress& progress)
      : in_(input), constants_(constants), builder_(builder), progress_(progress) {}

  Result<PickleValue> run() {
    if (!check_start()) return failure();
    std::uint64_t next_report = kProgressStep;
    while (!stopped_) {
      op_at_ = in_.position();
      const std::string_view op = in_.take(1);
      if (op.empty()) {
        truncated();
        return failure();
      }
      if (!step(static_cast<unsigned char>(op[0]))) return failure();
      if (progress_ && op_at_ >= next_report) {
        progress_(op_at_, in_.total());
        next_report = op_at_ + kProgressStep;
      }
    }
    if (progress_) progress_(in_.total(), in_.total());
    return stack_.back();
  }

 private:
  Error failure() const { return {Errc::kInvalidArgument, {}, mistake_}; }

  // All of these return false, so that a step can end with them.
  bool fail(std::string what) {
    mistake_ = std::move(what);
    return false;
  }
  bool damaged(const std::string& what) {
    return fail("damaged at byte " + std::to_string(op_at_) + ": " + what + "; copy it anew or " +
                kWriteAgain);
  }
  bool truncated() {
    if (!in_.failure().empty()) return fail(in_.failure());
    return fail("truncated: what starts at byte " + std::to_string(op_at_) +
                " does not end within the file's " + std::to_string(in_.total()) +
                " bytes; copy it anew or " + kWriteAgain);
  }
  bool code(const std::string& asks) {
    return fail("it asks for code: " + asks + " (byte " + std::to_string(op_at_) +
                "). A snapshot is plain data and this was not run; do not unpickle the file");
  }
  bool outside(const std::string& what) {
    return fail("it needs " + what + " (byte " + std::to_string(op_at_) +
                "), which no snapshot does; " + kWriteAgain);
  }

  bool check_start() {
    if (in_.total() == 0) return fail("the file is empty; " + std::string(kWriteAgain));
    const std::string_view start = in_.take(1);
    if (start.empty()) return truncated();
    const char first = start[0];
    if (static_cast<unsigned char>(first) == kProto) {
      op_at_ = 0;
      return step(kProto);
    }
    std::string what;
    switch (first) {
      case 'P': what = "it looks like an archive (.zip, .npz, torch.save)"; break;
      case '\x1f': what = "it looks like something compressed; unpack it first"; break;
      case '{':
      case '[': what = "it looks like JSON"; break;
      case '<': what = "it looks like a web page"; break;
      case '(':
      case '}':
      case ']': what = "it may be one of protocol 0 or 1; " + std::string(kWriteAgain); break;
      default: what = "expected what torch.cuda.memory._dump_snapshot() writes"; break;
    }
    return fail("not a pickle of protocol 2 to 5: " + what);
  }

  std::size_t fence() const { return marks_.empty() ? 0 : marks_.back(); }
  bool has(std::size_t n) {
    return stack_.size() - fence() >= n || damaged("the stack is too short");
  }

  bool push(PickleValue value) {
    if (stack_.size() == kMaxStack) return fail("too large: more than 2^27 values at once");
    stack_.push_back(value);
    return true;
  }
  PickleValue pop() {
    const PickleValue value = stack_.back();
    stack_.pop_back();
    return value;
  }

  // What was pushed since the last mark; it stays on the stack until drop(). False without a mark.
  bool since_mark(std::span<const PickleValue>& items) {
    if (marks_.empty()) return damaged("a mark is missing");
    items = std::span(stack_).subspan(marks_.back());
    return true;
  }
  void drop_to_mark() {
    stack_.resize(marks_.back());
    marks_.pop_back();
  }
  // The same for what is added to the container below the mark.
  bool since_mark(Kind below, std::span<const PickleValue>& items) {
    if (!since_mark(items)) return false;
    const std::size_t mark = marks_.back();
    const std::size_t lower = marks_.size() > 1 ? marks_[marks_.size() - 2] : 0;
    if (mark == lower) return damaged("the stack is too short");
    return is_container(stack_[mark - 1], below);
  }
  bool is_container(PickleValue value, Kind wanted) {
    return value.is(wanted) ||
           damaged("items are added to " + std::string(to_string(value.kind())) + ", not to " +
                   to_string(wanted));
  }
  bool done(const PickleBuilder::Mistake& mistake) {
    return !mistake || fail(*mistake + " (byte " + std::to_string(op_at_) + ")");
  }

  template <class T>
  bool number(std::size_t bytes, T& n) {
    const std::string_view piece = in_.take(bytes);
    if (piece.empty()) return truncated();
    n = little<T>(piece);
    return true;
  }
  template <class T>
  bool push_int(std::size_t bytes) {
    T n = 0;
    return number(bytes, n) && push(constants_.make_int(static_cast<std::int64_t>(n)));
  }

  bool push_long(std::size_t length_bytes) {
    std::uint64_t length = 0;
    if (!number(length_bytes, length)) return false;
    if (length == 0) return push(constants_.make_int(0));
    if (length > in_.left()) return truncated();
    if (length > 9) return in_.skip(length) ? push(Kind::kHugeInt) : truncated();
    const std::string_view digits = in_.take(static_cast<std::size_t>(length));
    if (digits.empty()) return truncated();
    // Nine bytes are what a number from 2^63 on needs, with its sign, and also one that was padded.
    const std::uint64_t low = little<std::uint64_t>(digits.substr(0, 8));
    const bool negative = (digits.back() & 0x80) != 0;
    if (length == 9) {
      const bool fits = digits[8] == (negative ? '\xff' : '\0') && (low >> 63 != 0) == negative;
      return push(fits ? constants_.make_int(static_cast<std::int64_t>(low))
                       : PickleValue(Kind::kHugeInt));
    }
    const int unused = 64 - static_cast<int>(length) * 8;
    return push(constants_.make_int(static_cast<std::int64_t>(low << unused) >> unused));
  }

  bool push_text(std::size_t length_bytes) {
    std::uint64_t length = 0;
    if (!number(length_bytes, length)) return false;
    if (length > in_.left()) return truncated();
    const auto kept = static_cast<std::size_t>(std::min<std::uint64_t>(length, kMaxText));
    std::string_view text;
    if (kept > 0) {
      text = in_.take(kept);
      if (text.empty()) return truncated();
    }
    const std::uint32_t index = constants_.texts.number(text);
    if (constants_.texts.size() > kMaxTexts)
      return fail("too large: more than 2^24 different texts");
    if (!in_.skip(length - kept)) return truncated();
    return push({Kind::kText, index});
  }
  bool push_bytes(std::size_t length_bytes) {
    std::uint64_t length = 0;
    if (!number(length_bytes, length)) return false;
    return in_.skip(length) ? push(Kind::kBytes) : truncated();
  }
  bool push_float() {
    const std::string_view digits = in_.take(8);
    if (digits.empty()) return truncated();
    std::uint64_t bits = 0;
    for (const char digit : digits) bits = bits << 8 | static_cast<unsigned char>(digit);
    constants_.floats.push_back(std::bit_cast<double>(bits));
    return push({Kind::kFloat, static_cast<std::int64_t>(constants_.floats.size() - 1)});
  }

  bool put(std::uint64_t slot) {
    // A writer numbers its slots from 0 on, and each costs it a byte or more.
    if (slot > op_at_) return damaged("memo slot " + std::to_string(slot) + " is out of any order");
    if (!has(1)) return false;
    memo_.grow(static_cast<std::size_t>(slot) + 1);
    PickleValue& place = memo_[static_cast<std::size_t>(slot)];
    if (place.is(Kind::kUnset)) ++memo_used_;
    place = stack_.back();
    return true;
  }
  bool put_numbered(std::size_t bytes) {
    std::uint64_t slot = 0;
    return number(bytes, slot) && put(slot);
  }
  bool get(std::size_t bytes) {
    std::uint64_t slot = 0;
    if (!number(bytes, slot)) return false;
    if (slot >= memo_.size() || memo_[static_cast<std::size_t>(slot)].is(Kind::kUnset)) {
      return damaged("memo slot " + std::to_string(slot) + " is read before it is written");
    }
    return push(memo_[static_cast<std::size_t>(slot)]);
  }

  bool tuple(std::size_t n) {
    if (!has(n)) return false;
    const PickleValue made = builder_.new_tuple(std::span(stack_).last(n));
    stack_.resize(stack_.size() - n);
    return push(made);
  }

  bool global_of_text() {
    std::string module, name;
    if (!in_.take_line(module) || !in_.take_line(name)) return truncated();
    return code("'" + printable(module) + "." + printable(name) + "'");
  }
  bool global_of_stack() {
    if (!has(2)) return false;
    const PickleValue name = pop(), module = pop();
    const auto text = [&](PickleValue v) {
      return v.is(Kind::kText) ? printable(constants_.texts[v.text()]) : std::string("?");
    };
    return code("'" + text(module) + "." + text(name) + "'");
  }

  bool step(unsigned char op) {
    std::span<const PickleValue> items;
    switch (op) {
      case kProto: {
        std::uint32_t version = 0;
        if (!number(1, version)) return false;
        return (version >= 2 && version <= 5) ||
               fail("protocol " + std::to_string(version) +
                    " is not one of 2 to 5: not a pickle, or " + kWriteAgain);
      }
      case kFrame: {
        std::uint64_t length = 0;
        if (!number(8, length)) return false;
        return length <= in_.left() || truncated();
      }
      case kStop:
        if (!has(1)) return false;
        stopped_ = marks_.empty() || damaged("it ends within a list or dict");
        return stopped_;

      case kNone: return push(Kind::kNone);
      case kNewTrue: return push({Kind::kBool, 1});
      case kNewFalse: return push({Kind::kBool, 0});
      case kBinInt1: return push_int<std::uint8_t>(1);
      case kBinInt2: return push_int<std::uint16_t>(2);
      case kBinInt: {
        std::uint32_t n = 0;
        return number(4, n) && push(constants_.make_int(static_cast<std::int32_t>(n)));
      }
      case kLong1: return push_long(1);
      case kLong4: return push_long(4);
      case kBinFloat: return push_float();
      case kShortBinUnicode:
      case kShortBinString: return push_text(1);
      case kBinUnicode:
      case kBinString: return push_text(4);
      case kBinUnicode8: return push_text(8);
      case kShortBinBytes: return push_bytes(1);
      case kBinBytes: return push_bytes(4);
      case kBinBytes8:
      case kByteArray8: return push_bytes(8);

      case kMark:
        if (marks_.size() == kMaxStack) return fail("too large: more than 2^27 open marks");
        marks_.push_back(stack_.size());
        return true;
      case kPop:
        // As in Python: without anything above it, the mark itself goes.
        if (stack_.size() == fence() && !marks_.empty()) {
          marks_.pop_back();
          return true;
        }
        if (!has(1)) return false;
        stack_.pop_back();
        return true;
      case kPopMark:
        if (!since_mark(items)) return false;
        drop_to_mark();
        return true;
      case kDup: return has(1) && push(stack_.back());

      case kBinPut: return put_numbered(1);
      case kLongBinPut: return put_numbered(4);
      case kMemoize: return put(memo_used_);
      case kBinGet: return get(1);
      case kLongBinGet: return get(4);

      case kEmptyTuple: return tuple(0);
      case kTuple1: return tuple(1);
      case kTuple2: return tuple(2);
      case kTuple3: return tuple(3);
      case kTuple:
      case kFrozenSet: {
        if (!since_mark(items)) return false;
        const PickleValue made = builder_.new_tuple(items);
        drop_to_mark();
        return push(made);
      }

      case kEmptyList:
      case kEmptySet: return push(builder_.new_list());
      case kList: {
        if (!since_mark(items)) return false;
        const PickleValue made = builder_.new_list();
        if (!done(builder_.extend(made, items))) return false;
        drop_to_mark();
        return push(made);
      }
      case kAppend: {
        if (!has(2) || !is_container(stack_[stack_.size() - 2], Kind::kList)) return false;
        const PickleValue item = pop();
        return done(builder_.extend(stack_.back(), {&item, 1}));
      }
      case kAppends:
      case kAddItems:
        if (!since_mark(Kind::kList, items)) return false;
        if (!done(builder_.extend(stack_[marks_.back() - 1], items))) return false;
        drop_to_mark();
        return true;

      case kEmptyDict: return push(builder_.new_dict());
      case kDict: {
        if (!since_mark(items)) return false;
        if (items.size() % 2 != 0) return damaged("a dict has a key without a value");
        const PickleValue made = builder_.new_dict();
        if (!done(builder_.set_items(made, items))) return false;
        drop_to_mark();
        return push(made);
      }
      case kSetItem: {
        if (!has(3) || !is_container(stack_[stack_.size() - 3], Kind::kDict)) return false;
        const PickleValue value = pop(), key = pop();
        const PickleValue pair[] = {key, value};
        return done(builder_.set_items(stack_.back(), pair));
      }
      case kSetItems:
        if (!since_mark(Kind::kDict, items)) return false;
        if (items.size() % 2 != 0) return damaged("a dict has a key without a value");
        if (!done(builder_.set_items(stack_[marks_.back() - 1], items))) return false;
        drop_to_mark();
        return true;

      case kGlobal:
      case kInst: return global_of_text();
      case kStackGlobal: return global_of_stack();
      case kReduce: return code("a call");
      case kBuild: return code("the state of an object");
      case kObj:
      case kNewObj:
      case kNewObjEx: return code("an object of a class");
      case kExt1:
      case kExt2:
      case kExt4: return code("a class by its extension number");
      case kPersId:
      case kBinPersId: return outside("an object that is kept elsewhere");
      case kNextBuffer:
      case kReadOnlyBuffer: return outside("a buffer that is kept elsewhere");
      default: break;
    }
    constexpr char kDigits[] = "0123456789abcdef";
    return damaged(std::string("0x") + kDigits[op >> 4] + kDigits[op & 15] +
                   " is no operation of a pickle of protocol 2 to 5");
  }

  PickleInput& in_;
  PickleConstants& constants_;
  PickleBuilder& builder_;
  const ReadProgress& progress_;

  std::vector<PickleValue> stack_;
  std::vector<std::size_t> marks_;  // sizes of the stack
  PagedVector<PickleValue> memo_;
  std::uint64_t memo_used_ = 0;
  std::uint64_t op_at_ = 0;
  bool stopped_ = false;
  std::string mistake_;
};

}  // namespace

const char* to_string(PickleValue::Kind kind) {
  switch (kind) {
    case Kind::kUnset: return "nothing";
    case Kind::kNone: return "None";
    case Kind::kBool: return "a bool";
    case Kind::kInt:
    case Kind::kWideInt: return "an int";
    case Kind::kHugeInt: return "an int of more than 64 bits";
    case Kind::kFloat: return "a float";
    case Kind::kText: return "a str";
    case Kind::kBytes: return "bytes";
    case Kind::kTuple: return "a tuple";
    case Kind::kList: return "a list";
    case Kind::kDict: return "a dict";
  }
  return "unknown";
}

std::uint32_t TextTable::number(std::string_view text) {
  if (const auto found = numbers_.find(text); found != numbers_.end()) return found->second;
  const auto index = static_cast<std::uint32_t>(texts_.size());
  const std::string_view kept = keep(text);
  texts_.push_back(kept);
  numbers_.emplace(kept, index);
  return index;
}

std::string_view TextTable::keep(std::string_view text) {
  constexpr std::size_t kPage = std::size_t{1} << 16;
  if (storage_.empty() || storage_.back().capacity() - storage_.back().size() < text.size()) {
    storage_.emplace_back().reserve(std::max(kPage, text.size()));
  }
  std::vector<char>& page = storage_.back();
  const std::size_t begin = page.size();
  page.insert(page.end(), text.begin(), text.end());
  return {page.data() + begin, text.size()};
}

PickleValue PickleConstants::make_int(std::int64_t n) {
  if (PickleValue::fits(n)) return {Kind::kInt, n};
  wide.push_back(n);
  return {Kind::kWideInt, static_cast<std::int64_t>(wide.size() - 1)};
}

std::optional<std::int64_t> PickleConstants::as_int(PickleValue value) const {
  if (value.is(Kind::kInt) || value.is(Kind::kBool)) return value.payload();
  if (value.is(Kind::kWideInt)) return wide[value.number()];
  return std::nullopt;
}

Result<PickleValue> read_pickle(PickleInput& input, PickleConstants& constants,
                                PickleBuilder& builder, const ReadProgress& progress) {
  return Interpreter(input, constants, builder, progress).run();
}

}  // namespace gpumemx
