// SPDX-License-Identifier: BSD-3-Clause
//
// Every operation that plain data is written with, at its limits; and each way in which a file can be
// something else.
#include "replay/pickle.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "support/pickles.hpp"

namespace gpumemx {
namespace {

using Kind = PickleValue::Kind;
using namespace std::string_literals;

// Keeps everything, and writes it as Python's repr() would, nearly.
class Keeper final : public PickleBuilder {
 public:
  PickleConstants constants;

  PickleValue new_list() override { return add(Kind::kList, {}); }
  PickleValue new_dict() override { return add(Kind::kDict, {}); }
  PickleValue new_tuple(std::span<const PickleValue> items) override {
    return add(Kind::kTuple, {items.begin(), items.end()});
  }
  Mistake extend(PickleValue list, std::span<const PickleValue> items) override {
    return append(list, items);
  }
  Mistake set_items(PickleValue dict, std::span<const PickleValue> items) override {
    return append(dict, items);
  }

  std::string repr(PickleValue value) const {
    switch (value.kind()) {
      case Kind::kInt:
      case Kind::kWideInt: return std::to_string(*constants.as_int(value));
      case Kind::kHugeInt: return "huge";
      case Kind::kBool: return value.payload() != 0 ? "True" : "False";
      case Kind::kFloat: return std::to_string(constants.floats[value.number()]);
      case Kind::kText: return "'" + std::string(constants.texts[value.text()]) + "'";
      case Kind::kBytes: return "bytes";
      case Kind::kList: return "[" + items(value, ", ") + "]";
      case Kind::kTuple: return "(" + items(value, ", ") + ")";
      case Kind::kDict: return "{" + items(value, " ") + "}";
      case Kind::kNone: return "None";
      case Kind::kUnset: break;
    }
    return "unset";
  }

 private:
  PickleValue add(Kind kind, std::vector<PickleValue> items) {
    held_.push_back(std::move(items));
    return {kind, static_cast<std::int64_t>(held_.size() - 1)};
  }
  Mistake append(PickleValue to, std::span<const PickleValue> items) {
    std::vector<PickleValue>& held = held_[to.number()];
    held.insert(held.end(), items.begin(), items.end());
    return {};
  }
  std::string items(PickleValue value, const char* between) const {
    std::string out;
    for (const PickleValue item : held_[value.number()]) {
      if (!out.empty()) out += between;
      out += repr(item);
    }
    return out;
  }

  std::vector<std::vector<PickleValue>> held_;
};

std::string read(const std::string& bytes) {
  Keeper keeper;
  PickleInput input(std::as_bytes(std::span(bytes)));
  const auto value = read_pickle(input, keeper.constants, keeper);
  return value.ok() ? keeper.repr(value.value()) : value.error().where;
}
// `body` between the protocol and the stop.
std::string body(const std::string& bytes) { return read("\x80\x04" + bytes + "."); }

TEST(Pickle, ReadsEveryNumber) {
  EXPECT_EQ(body("K\xff"), "255");
  EXPECT_EQ(body("M\xff\xff"), "65535");
  EXPECT_EQ(body("J\xff\xff\xff\xff"), "-1");
  EXPECT_EQ(body("J\xff\xff\xff\x7f"), "2147483647");
  EXPECT_EQ(body("\x8a\x00"s), "0");
  EXPECT_EQ(body("\x8a\x01\x80"), "-128");
  EXPECT_EQ(body("\x8a\x02\xff\x00"s), "255");
  EXPECT_EQ(body("\x8a\x06\x00\x00\x00\x00\xfa\x7e"s), "139612206923776");
  EXPECT_EQ(body("\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"), "9223372036854775807");
  EXPECT_EQ(body("\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80"s), "-9223372036854775808");
  EXPECT_EQ(body("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\x7f\x00"s), "9223372036854775807");
  EXPECT_EQ(body("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00"s), "huge");
  EXPECT_EQ(body("\x8a\x0a" + std::string(10, '\x01')), "huge");
  EXPECT_EQ(body("\x8b\x02\x00\x00\x00\x00\x01"s), "256");
  EXPECT_EQ(body("G\x3f\xf8\x00\x00\x00\x00\x00\x00"s), "1.500000");
  EXPECT_EQ(body("\x88\x89N\x87"), "(True, False, None)");
}

TEST(Pickle, KeepsNumbersOfMoreThan60Bits) {
  for (const std::int64_t n : {(1ll << 59) - 1, 1ll << 59, -(1ll << 59), -(1ll << 59) - 1}) {
    EXPECT_EQ(body(pickles::num(n)), std::to_string(n));
  }
}

TEST(Pickle, ReadsEveryText) {
  EXPECT_EQ(body("\x8c\x03"s + "abc"), "'abc'");
  EXPECT_EQ(body("\x8c\x00"s), "''");
  EXPECT_EQ(body("X\x03\x00\x00\x00"s + "abc"), "'abc'");
  EXPECT_EQ(body("\x8d\x03\x00\x00\x00\x00\x00\x00\x00"s + "abc"), "'abc'");
  // Of Python 2.
  EXPECT_EQ(body("U\x03"s + "abc"), "'abc'");
  EXPECT_EQ(body("T\x03\x00\x00\x00"s + "abc"), "'abc'");
}

TEST(Pickle, SkipsBytes) {
  EXPECT_EQ(body("C\x02"s + "ab"), "bytes");
  EXPECT_EQ(body("B\x02\x00\x00\x00"s + "ab"), "bytes");
  EXPECT_EQ(body("\x8e\x02\x00\x00\x00\x00\x00\x00\x00"s + "ab"), "bytes");
  EXPECT_EQ(body("\x96\x02\x00\x00\x00\x00\x00\x00\x00"s + "ab"), "bytes");
}

TEST(Pickle, ReadsEveryContainer) {
  EXPECT_EQ(body(")"), "()");
  EXPECT_EQ(body("N\x85"), "(None)");
  EXPECT_EQ(body("K\x01K\x02\x86"), "(1, 2)");
  EXPECT_EQ(body("(K\x01K\x02K\x03K\x04t"), "(1, 2, 3, 4)");
  EXPECT_EQ(body("]"), "[]");
  EXPECT_EQ(body("]K\x01"s + "a"), "[1]");
  EXPECT_EQ(body("](K\x01K\x02"s + "e"), "[1, 2]");
  EXPECT_EQ(body("(K\x01K\x02l"), "[1, 2]");
  EXPECT_EQ(body("}"), "{}");
  EXPECT_EQ(body("}K\x01K\x02s"), "{1 2}");
  EXPECT_EQ(body("}(K\x01K\x02K\x03K\x04u"), "{1 2 3 4}");
  EXPECT_EQ(body("(K\x01K\x02"s + "d"), "{1 2}");
  EXPECT_EQ(body("\x8f(K\x01\x90"), "[1]");
  EXPECT_EQ(body("(K\x01\x91"), "(1)");
}

TEST(Pickle, KeepsTheStackAndTheMemo) {
  EXPECT_EQ(body("K\x01K\x02"s + "0"), "1");
  EXPECT_EQ(body("K\x01(K\x02"s + "1"), "1");
  EXPECT_EQ(body("K\x01(0"), "1");
  EXPECT_EQ(body("]K\x01"s + "2\x86" + "a"), "[(1, 1)]");
  EXPECT_EQ(body("K\x05q\x00"s + "0h\x00"s), "5");
  EXPECT_EQ(body("K\x05r\x01\x00\x00\x00"s + "0j\x01\x00\x00\x00"s), "5");
  EXPECT_EQ(body("K\x05\x94K\x06\x94"s + "00h\x00h\x01\x86"s), "(5, 6)");
  // A list that is filled after it was remembered is one list.
  EXPECT_EQ(body("]\x94K\x01"s + "ah\x00\x86"s), "([1], [1])");
  EXPECT_EQ(body("](]\x94K\x01"s + "ah\x00"s + "e"), "[[1], [1]]");
}

TEST(Pickle, ReadsFrames) {
  EXPECT_EQ(body("\x95\x02\x00\x00\x00\x00\x00\x00\x00K\x01"s), "1");
  EXPECT_NE(body("\x95\xff\x00\x00\x00\x00\x00\x00\x00K\x01"s).find("truncated"),
            std::string::npos);
}

TEST(Pickle, ReadsEveryProtocolFrom2To5) {
  for (char version = 2; version <= 5; ++version) {
    EXPECT_EQ(read(std::string("\x80") + version + "N."), "None");
  }
  EXPECT_EQ(read("\x80\x06N.").find("protocol 6 is not one of 2 to 5"), 0u);
  EXPECT_EQ(read("\x80\x01N.").find("protocol 1 is not one of 2 to 5"), 0u);
}

TEST(Pickle, DoesNotLookBehindTheEnd) { EXPECT_EQ(body("N.garbage"), "None"); }

TEST(Pickle, NamesTheCodeThatAFileAsksForAndRunsNothing) {
  const auto asks = [](const std::string& what, int at) {
    return "it asks for code: " + what + " (byte " + std::to_string(at) +
           "). A snapshot is plain data and this was not run; do not unpickle the file";
  };
  EXPECT_EQ(body("cos\nsystem\n(X\x02\x00\x00\x00lstR"s), asks("'os.system'", 2));
  EXPECT_EQ(body("\x8c\x02os\x8c\x06system\x93"), asks("'os.system'", 14));
  EXPECT_EQ(body("(ios\nsystem\n"), asks("'os.system'", 3));
  EXPECT_EQ(body("N)R"), asks("a call", 4));
  EXPECT_EQ(body("N}b"), asks("the state of an object", 4));
  for (const char* op : {"o", "\x81", "\x92"}) {
    EXPECT_EQ(body("NN"s + op), asks("an object of a class", 4));
  }
  for (const char* op : {"\x82", "\x83", "\x84"}) {
    EXPECT_EQ(body(op), asks("a class by its extension number", 2));
  }
  EXPECT_EQ(body("c" + std::string(100, 'm') + "\n\x1b[31m\n"),
            asks("'" + std::string(60, 'm') + "....?[31m'", 2));
}

TEST(Pickle, RefusesWhatIsKeptElsewhere) {
  for (const char* op : {"P1\n", "Q", "\x97", "\x98"}) {
    EXPECT_EQ(body("N"s + op).find("it needs "), 0u) << op;
  }
}

TEST(Pickle, SaysWhatAFileIsInstead) {
  EXPECT_EQ(read("").find("the file is empty"), 0u);
  const auto is = [](const std::string& bytes, const char* what) {
    return read(bytes).starts_with("not a pickle of protocol 2 to 5: " + std::string(what));
  };
  EXPECT_TRUE(is("PK\x03\x04", "it looks like an archive"));
  EXPECT_TRUE(is("\x1f\x8b", "it looks like something compressed"));
  EXPECT_TRUE(is("{\"segments\": []}", "it looks like JSON"));
  EXPECT_TRUE(is("<html>", "it looks like a web page"));
  EXPECT_TRUE(is("(dp0\n.", "it may be one of protocol 0 or 1"));
  EXPECT_TRUE(is("hello", "expected what torch.cuda.memory._dump_snapshot() writes"));
}

TEST(Pickle, SaysWhereADamagedFileIsDamaged) {
  const auto damaged = [](const std::string& bytes, const char* what) {
    const std::string said = body(bytes);
    return said.starts_with("damaged at byte ") && said.find(what) != std::string::npos;
  };
  EXPECT_TRUE(damaged("\xfe", "0xfe is no operation"));
  EXPECT_TRUE(damaged("I1\n", "0x49 is no operation"));
  EXPECT_TRUE(damaged("h\x05", "memo slot 5 is read before it is written"));
  EXPECT_TRUE(damaged("Nr\xff\xff\xff\xff", "memo slot 4294967295 is out of any order"));
  EXPECT_TRUE(damaged("t", "a mark is missing"));
  EXPECT_TRUE(damaged("(NNe", "the stack is too short"));
  EXPECT_TRUE(damaged("N(Ne", "items are added to None, not to a list"));
  EXPECT_TRUE(damaged("]NNs", "items are added to a list, not to a dict"));
  EXPECT_TRUE(damaged("}(Nu", "a dict has a key without a value"));
  EXPECT_TRUE(damaged("(N", "it ends within a list or dict"));
  EXPECT_TRUE(damaged("", "the stack is too short"));
  EXPECT_TRUE(damaged("N(\x85", "the stack is too short"));  // not below the mark
}

TEST(Pickle, AllocatesNothingForALengthThatIsNotThere) {
  for (const char* op :
       {"X\xff\xff\xff\xff", "T\xff\xff\xff\xff", "B\xff\xff\xff\xff", "\x8b\xff\xff\xff\xff",
        "\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "\x8e\xff\xff\xff\xff\xff\xff\xff\xff",
        "\x96\xff\xff\xff\xff\xff\xff\xff\xff"}) {
    EXPECT_EQ(body(op + "abc"s).find("truncated: what starts at byte 2 does not end within"), 0u);
  }
}

TEST(Pickle, SaysThatEveryCutIsACut) {
  const std::string whole =
      pickles::whole(pickles::dict({{"a", pickles::list({pickles::num(1), pickles::text("b")})},
                                    {"c", "G\x3f\xf8\x00\x00\x00\x00\x00\x00"s}}));
  ASSERT_EQ(read(whole), "{'a' [1, 'b'] 'c' 1.500000}");
  for (std::size_t size = 1; size < whole.size(); ++size) {
    EXPECT_EQ(read(whole.substr(0, size)).find("truncated: "), 0u) << size;
  }
}

TEST(Pickle, NestsDeeplyWithoutRecursion) {
  class Counter final : public PickleBuilder {
   public:
    PickleValue new_list() override { return Kind::kList; }
    PickleValue new_dict() override { return Kind::kDict; }
    PickleValue new_tuple(std::span<const PickleValue>) override { return Kind::kTuple; }
    Mistake extend(PickleValue, std::span<const PickleValue> items) override {
      added += items.size();
      return {};
    }
    Mistake set_items(PickleValue, std::span<const PickleValue>) override { return {}; }
    std::size_t added = 0;
  };
  constexpr std::size_t kDeep = 1'000'000;
  std::string deep = "\x80\x04";
  deep += std::string(kDeep, ']') + std::string(kDeep - 1, 'a') + ".";
  PickleInput input(std::as_bytes(std::span(deep)));
  PickleConstants constants;
  Counter counter;
  ASSERT_TRUE(read_pickle(input, constants, counter).ok());
  EXPECT_EQ(counter.added, kDeep - 1);
}

TEST(Pickle, KeepsOnlyTheBeginOfAVeryLongText) {
  const std::string long_text(200'000, 'x');
  EXPECT_EQ(body(pickles::text(long_text)), "'" + long_text.substr(0, 65536) + "'");
}

TEST(Pickle, ReadsAFileInPiecesAndTellsHowFarItIs) {
  const std::string path = testing::TempDir() + "pieces.pickle";
  std::vector<std::string> texts;
  for (int i = 0; i < 300; ++i)
    texts.push_back(pickles::text(std::string(60'000, static_cast<char>('a' + i % 26))));
  const std::string whole = pickles::whole(pickles::list(texts));
  std::ofstream(path, std::ios::binary) << whole;

  Keeper from_file, from_memory;
  PickleInput memory(std::as_bytes(std::span(whole)));
  const auto expected = read_pickle(memory, from_memory.constants, from_memory);
  auto input = PickleInput::open(path);
  ASSERT_TRUE(input.ok());
  PickleInput file = std::move(input).take();
  std::vector<std::uint64_t> seen;
  const auto got = read_pickle(file, from_file.constants, from_file,
                               [&](std::uint64_t done, std::uint64_t total) {
                                 EXPECT_EQ(total, whole.size());
                                 seen.push_back(done);
                               });
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(from_file.repr(got.value()), from_memory.repr(expected.value()));
  ASSERT_EQ(seen.size(), 3u);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(seen.back(), whole.size());
  std::remove(path.c_str());
}

TEST(PickleInput, SaysWhyAFileIsNotOpened) {
  EXPECT_EQ(PickleInput::open("/nowhere/at.all").error().where, "No such file or directory");
  EXPECT_EQ(PickleInput::open(testing::TempDir()).error().where, "Is a directory");
  EXPECT_EQ(PickleInput::open("/dev/null").error().where,
            "not a regular file: copy it to one first");
}

TEST(PickleInput, NoticesAFileThatBecomesShorter) {
  const std::string path = testing::TempDir() + "shrinking.pickle";
  std::ofstream(path, std::ios::binary)
      << pickles::whole(pickles::text(std::string(9'000'000, 'x')));
  auto opened = PickleInput::open(path);
  ASSERT_TRUE(opened.ok());
  PickleInput input = std::move(opened).take();
  std::ofstream(path, std::ios::binary) << "\x80";
  Keeper keeper;
  const auto value = read_pickle(input, keeper.constants, keeper);
  ASSERT_FALSE(value.ok());
  EXPECT_EQ(value.error().where, "the file became shorter while it was read");
  std::remove(path.c_str());
}

}  // namespace
}  // namespace gpumemx
