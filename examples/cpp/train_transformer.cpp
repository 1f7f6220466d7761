// SPDX-License-Identifier: BSD-3-Clause
//
// Trains a small character-level transformer on sums ("17 plus 25 is 42.") with LibTorch and gpumemx:
//
//   train_transformer [--steps N] [--cpu] [--no-gpumemx] [--losses FILE]
//
// The loss goes down from that of guessing (3.6). Sequences have a different length in
// every step, which is what leaves holes in a caching allocator's memory. --no-gpumemx keeps torch's
// own allocator: the losses are the same, bit for bit; --losses writes them down exactly, to compare.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <gpumemx/gpumemx.hpp>
#include <iostream>
#include <random>
#include <string>
#include <vector>

namespace {

namespace nn = torch::nn;

struct Options {
  int steps = 60;
  bool on_cpu = false;
  bool use_gpumemx = true;
  std::string losses_file;
};

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool has_next = i + 1 < argc;
    if (word == "--steps" && has_next) {
      options.steps = std::atoi(argv[++i]);
    } else if (word == "--cpu") {
      options.on_cpu = true;
    } else if (word == "--no-gpumemx") {
      options.use_gpumemx = false;
    } else if (word == "--losses" && has_next) {
      options.losses_file = argv[++i];
    } else {
      std::fprintf(stderr, "train_transformer: '%s' is not understood\n", word.c_str());
      std::exit(2);
    }
  }
  if (options.steps < 1) {
    std::fprintf(stderr, "train_transformer: --steps takes a number from 1 on\n");
    std::exit(2);
  }
  return options;
}

// --- the text: lower-case letters, digits, space and full stop, one number each

constexpr char kLetters[] = " .abcdefghijklmnopqrstuvwxyz0123456789";
constexpr std::int64_t kVocabulary = sizeof kLetters - 1;

std::vector<std::int64_t> make_text(std::size_t length) {
  std::mt19937 random(1);
  std::string text;
  while (text.size() < length) {
    const auto a = random() % 50, b = random() % 50;
    text +=
        std::to_string(a) + " plus " + std::to_string(b) + " is " + std::to_string(a + b) + ". ";
  }
  std::vector<std::int64_t> numbers;
  for (std::size_t i = 0; i < length; ++i) {
    numbers.push_back(std::strchr(kLetters, text[i]) - kLetters);
  }
  return numbers;
}

// --- the model

struct LanguageModelImpl : nn::Module {
  LanguageModelImpl(std::int64_t width, std::int64_t heads, std::int64_t layers,
                    std::int64_t longest)
      : letters(register_module("letters", nn::Embedding(kVocabulary, width))),
        places(register_module("places", nn::Embedding(longest, width))),
        blocks(register_module("blocks", nn::TransformerEncoder(nn::TransformerEncoderOptions(
                                             nn::TransformerEncoderLayerOptions(width, heads)
                                                 .dim_feedforward(4 * width)
                                                 .dropout(0.1),
                                             layers)))),
        head(register_module("head", nn::Linear(width, kVocabulary))) {}

  // text: [batch, length]; what comes back: [batch, length, kVocabulary].
  torch::Tensor forward(const torch::Tensor& text) {
    const std::int64_t length = text.size(1);
    const auto place = torch::arange(length, text.options());
    auto x = letters(text) + places(place).unsqueeze(0);
    const auto mask = nn::TransformerImpl::generate_square_subsequent_mask(length).to(x.device());
    x = blocks(x.transpose(0, 1), mask).transpose(0, 1);
    return head(x);
  }

  nn::Embedding letters, places;
  nn::TransformerEncoder blocks;
  nn::Linear head;
};
TORCH_MODULE(LanguageModel);

void train(const Options& options) {
  const torch::Device device(options.on_cpu ? torch::kCPU : torch::kCUDA);
  // A device has room for more than a CPU has patience for.
  const std::int64_t width = options.on_cpu ? 64 : 512, layers = options.on_cpu ? 2 : 6;
  const std::int64_t batch = options.on_cpu ? 16 : 64, longest = options.on_cpu ? 64 : 256;

  // Two runs with the same seed do the same sums in the same order.
  torch::manual_seed(7);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  at::globalContext().setDeterministicCuDNN(true);

  LanguageModel model(width, 8, layers, longest);
  model->to(device);
  model->train();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
  const std::vector<std::int64_t> text = make_text(100'000);
  std::mt19937 random(3);

  std::vector<float> losses;
  gpumemx::GPUMonitor whole("training");
  for (int step = 0; step < options.steps; ++step) {
    // The fourth step shows what a step does once its memory is there.
    gpumemx::GPUMonitor one("step 3");
    const auto length = static_cast<std::int64_t>(longest / 4 + random() % (3 * longest / 4));
    std::vector<torch::Tensor> rows;
    for (std::int64_t row = 0; row < batch; ++row) {
      const auto at = random() % (text.size() - static_cast<std::size_t>(length) - 1);
      rows.push_back(torch::tensor(
          std::vector<std::int64_t>(text.begin() + static_cast<std::ptrdiff_t>(at),
                                    text.begin() + static_cast<std::ptrdiff_t>(at) + length + 1)));
    }
    const auto sequences = torch::stack(rows).to(device);
    const auto input = sequences.slice(1, 0, length), target = sequences.slice(1, 1, length + 1);

    optimizer.zero_grad();
    const auto guesses = model(input).reshape({-1, kVocabulary});
    auto loss = nn::functional::cross_entropy(guesses, target.reshape({-1}));
    loss.backward();
    nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();

    losses.push_back(loss.item<float>());
    if (step % 10 == 0 || step + 1 == options.steps) {
      std::printf("step %3d  length %3d  loss %.4f\n", step, static_cast<int>(length),
                  static_cast<double>(losses.back()));
    }
    if (step == 3) std::cout << one.report() << '\n';
  }
  whole.end();

  std::cout << whole.report() << "\n\n" << gpumemx::memory_summary() << "\n\n";
  const gpumemx::MemoryInfo info = gpumemx::memory_info();
  constexpr double kGiB = 1 << 30;
  std::printf("allocator %s: peak live %.3f GiB, reserved %.3f GiB\n", info.allocator.c_str(),
              static_cast<double>(whole.peak()) / kGiB, static_cast<double>(info.reserved) / kGiB);

  if (!options.losses_file.empty()) {
    std::FILE* file = std::fopen(options.losses_file.c_str(), "w");
    if (file == nullptr) {
      std::perror(options.losses_file.c_str());
      std::exit(2);
    }
    for (const float loss : losses) std::fprintf(file, "%a\n", static_cast<double>(loss));
    std::fclose(file);
  }
  if (losses.size() >= 20 && losses.back() > 0.9F * losses.front()) {
    std::fprintf(stderr, "train_transformer: the loss did not go down\n");
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  // cuBLAS is deterministic with workspaces of a fixed size only.
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  const Options options = read_options(argc, argv);
  try {
    if (options.use_gpumemx) gpumemx::install_allocator();
    train(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_transformer: %s\n", error.what());
    return 1;
  }
  return 0;
}
