// SPDX-License-Identifier: BSD-3-Clause
#include "core/slab.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

struct Record {
  int value = 7;
  std::shared_ptr<int> owned;
  std::uint32_t id = 0;
};

TEST(Slab, GivesNumbersFromOneInOrderAndFindsThemAgain) {
  Slab<Record> slab;
  for (std::uint32_t n = 1; n <= 3000; ++n) {  // over several chunks
    Record* r = slab.acquire();
    ASSERT_EQ(r->id, n);
    ASSERT_EQ(slab.at(n), r);
  }
}

TEST(Slab, NeverMovesARecord) {
  Slab<Record> slab;
  Record* first = slab.acquire();
  first->value = 42;
  for (int n = 0; n < 5000; ++n) slab.acquire();
  EXPECT_EQ(slab.at(1), first);
  EXPECT_EQ(first->value, 42);
}

TEST(Slab, GivesAReleasedRecordOutNextAsGoodAsNew) {
  Slab<Record> slab;
  slab.acquire();
  Record* r = slab.acquire();
  r->value = 9;
  r->owned = std::make_shared<int>(1);
  const std::weak_ptr<int> seen = r->owned;
  slab.release(r);
  EXPECT_TRUE(seen.expired());  // what it owned went at once, not at its next use
  EXPECT_EQ(slab.acquire(), r);
  EXPECT_EQ(r->value, 7);
  EXPECT_EQ(r->id, 2u);
}

TEST(Slab, VisitsEveryRecordInTheOrderOfTheirNumbers) {
  Slab<Record> slab;
  for (int n = 0; n < 1500; ++n) slab.acquire();
  std::uint32_t next = 0;
  slab.for_each([&](Record* r) {
    ASSERT_EQ(r->id, next);
    ++next;
  });
  EXPECT_EQ(next, 2048u);  // number 0 and those not in use too
}

}  // namespace
}  // namespace gpumemx
