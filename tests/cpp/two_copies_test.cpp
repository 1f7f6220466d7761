// SPDX-License-Identifier: BSD-3-Clause
//
// Two copies of gpumemx in one process, as when a Python program that has installed it loads a C++ library
// that links it: the second sees that the first is installed, and does not put itself over it.
//
//   two_copies_test <a copy of libgpumemx.so>
#include <dlfcn.h>

#include <cstdio>
#include <gpumemx/gpumemx.hpp>
#include <string>

namespace {

void* the_copy = nullptr;

template <class Function>
Function* in_the_copy(const char* mangled) {
  void* found = dlsym(the_copy, mangled);
  if (found == nullptr) {
    std::fprintf(stderr, "two_copies_test: %s\n", dlerror());
    std::exit(2);
  }
  return reinterpret_cast<Function*>(found);
}

int failures = 0;
void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "two_copies_test: not so: %s\n", what);
  ++failures;
}

}  // namespace

int main(int argc, char** argv) {
  the_copy = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (the_copy == nullptr) {
    std::fprintf(stderr, "two_copies_test: %s\n", argc > 1 ? dlerror() : "which copy?");
    return 2;
  }
  auto* is_installed = in_the_copy<bool()>("_ZN7gpumemx12is_installedEv");
  auto* install =
      in_the_copy<void(const gpumemx::Settings&)>("_ZN7gpumemx17install_allocatorERKNS_8SettingsE");
  check(is_installed != &gpumemx::is_installed, "the copy has functions of its own");

  check(!is_installed(), "nothing is installed at first");
  gpumemx::install_allocator({{"cap", "1GiB"}});
  check(is_installed(), "the copy sees that it is");
  install({});  // what it is to do is done
  try {
    install({{"cap", "2GiB"}});
    check(false, "settings that it cannot set throw");
  } catch (const gpumemx::InstallError& error) {
    check(std::string(error.what()).find("installed already, by Python or by another copy") !=
              std::string::npos,
          "the error says who is installed");
  }
  for (const gpumemx::Setting& setting : gpumemx::settings()) {
    if (setting.key == "cap") check(setting.value == "1GiB", "the first one's settings stay");
  }
  return failures == 0 ? 0 : 1;
}
