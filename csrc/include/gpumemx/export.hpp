// SPDX-License-Identifier: BSD-3-Clause
//
// Marks what the shared library exports; everything else in it is hidden.
#pragma once

/// Part of the library's interface.
#define GPUMEMX_API __attribute__((visibility("default")))
