// SPDX-License-Identifier: BSD-3-Clause
//
// What tests on the simulated device write again and again: memory that is ready for use, and a
// look at the hazards that must be, or must not be.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "driver/sim/sim_driver.hpp"

namespace gpumemx {

// One handle at one address, USABLE.
struct SimPage {
  AddrRange range;
  HandleId handle{};
};

inline SimPage make_page(SimDriver& gpu, Bytes size = 2_MiB) {
  const AddrRange range = gpu.reserve(size, 2_MiB).value();
  const HandleId handle = gpu.create(size).value();
  EXPECT_TRUE(gpu.map(range, handle).ok());
  EXPECT_TRUE(gpu.set_access(range).ok());
  return {range, handle};
}

// A second address of the same memory, USABLE.
inline AddrRange make_alias(SimDriver& gpu, const SimPage& page) {
  const AddrRange range = gpu.reserve(page.range.size, 2_MiB).value();
  EXPECT_TRUE(gpu.map(range, page.handle).ok());
  EXPECT_TRUE(gpu.set_access(range).ok());
  return range;
}

inline void drop_page(SimDriver& gpu, const SimPage& page) {
  EXPECT_TRUE(gpu.unmap(page.range).ok());
  EXPECT_TRUE(gpu.release(page.handle).ok());
  EXPECT_TRUE(gpu.unreserve(page.range).ok());
}

inline std::string joined_hazards(const SimDriver& gpu) {
  std::string all;
  for (const std::string& text : gpu.hazards()) all += text + "\n";
  return all;
}

// Succeeds when exactly one hazard was noted and its text holds all the parts.
inline ::testing::AssertionResult is_the_hazard(const SimDriver& gpu,
                                                const std::vector<std::string>& parts) {
  if (gpu.hazard_count() != 1) {
    return ::testing::AssertionFailure() << gpu.hazard_count() << " hazards:\n"
                                         << joined_hazards(gpu);
  }
  const std::string text = gpu.hazards().front();
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << "no '" << part << "' in: " << text;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace gpumemx
