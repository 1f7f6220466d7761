// SPDX-License-Identifier: BSD-3-Clause
//
// The skeleton of a server that holds several models on one device and gives their memory back:
//
//   inference_server [--cpu] [--small]
//
// Clients put requests into a queue; one worker loads models as they are asked for and answers. When
// the device has no room for another one, gpumemx asks before the request fails, and the model that was
// used least recently goes. A model that is unloaded for good takes its memory with it: what the driver
// has free afterwards is printed.
#include <torch/torch.h>

#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <gpumemx/gpumemx.hpp>
#include <iostream>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace {

constexpr double kGiB = 1 << 30;

double gib(std::uint64_t bytes) { return static_cast<double>(bytes) / kGiB; }

// A stack of linear layers stands for a model: how many bytes it has is known before it is loaded.
struct ModelSize {
  std::int64_t width;
  int layers;
};

torch::nn::Sequential make_model(ModelSize size, torch::Device device) {
  torch::NoGradGuard no_grad;
  torch::nn::Sequential model;
  for (int i = 0; i < size.layers; ++i) {
    // Straight to the device: no copy of the weights in the host's memory.
    torch::nn::Linear layer(torch::nn::LinearOptions(1, 1));
    layer->weight.set_data(torch::randn({size.width, size.width}, device) * 0.01);
    layer->bias.set_data(torch::zeros({size.width}, device));
    model->push_back(layer);
    model->push_back(torch::nn::ReLU());
  }
  model->eval();
  return model;
}

// The models that are loaded, the one used last first. Used by the worker alone.
class ModelShelf {
 public:
  ModelShelf(ModelSize size, torch::Device device) : size_(size), device_(device) {}

  torch::nn::Sequential& get(const std::string& name) {
    for (auto it = loaded_.begin(); it != loaded_.end(); ++it) {
      if (it->first != name) continue;
      loaded_.splice(loaded_.begin(), loaded_, it);
      return it->second;
    }
    gpumemx::GPUMonitor load("load " + name, gpumemx::print_report);
    // Not on the shelf before it is whole: the callback below must not find it.
    auto model = make_model(size_, device_);
    loaded_.emplace_front(name, std::move(model));
    return loaded_.front().second;
  }

  // False when there is none.
  bool unload_oldest() {
    if (loaded_.empty()) return false;
    std::printf("no room: unloading %s\n", loaded_.back().first.c_str());
    loaded_.pop_back();
    return true;
  }
  void unload_all() { loaded_.clear(); }
  std::size_t size() const { return loaded_.size(); }

 private:
  ModelSize size_;
  torch::Device device_;
  std::list<std::pair<std::string, torch::nn::Sequential>> loaded_;
};

class Server {
 public:
  Server(ModelSize size, torch::Device device)
      : device_(device), shelf_(size, device), worker_([this] { work(); }) {}
  ~Server() {
    post([this] { is_over_ = true; });
    worker_.join();
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // The mean of the model's answer, which is enough to see that it has one.
  std::future<float> ask(const std::string& model, torch::Tensor input) {
    auto answer = std::make_shared<std::promise<float>>();
    auto future = answer->get_future();
    post([this, model, input = std::move(input), answer] {
      try {
        torch::NoGradGuard no_grad;
        answer->set_value(shelf_.get(model)->forward(input.to(device_)).mean().item<float>());
      } catch (...) {
        answer->set_exception(std::current_exception());
      }
    });
    return future;
  }

  // Unloads everything, and returns when that is done.
  void unload_all() {
    std::promise<void> done;
    post([&] {
      shelf_.unload_all();
      done.set_value();
    });
    done.get_future().wait();
  }

 private:
  void post(std::function<void()> job) {
    {
      const std::lock_guard<std::mutex> lock(mu_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }

  void work() {
    // Called on the thread whose request waits. It holds no lock that the shelf's user could wait for,
    // since that is the same thread.
    const auto worker = std::this_thread::get_id();
    const auto registration =
        gpumemx::on_memory_pressure([this, worker](const gpumemx::MemoryPressure&) {
          return std::this_thread::get_id() == worker && shelf_.unload_oldest();
        });
    while (!is_over_) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> lock(mu_);
        changed_.wait(lock, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job();
    }
  }

  torch::Device device_;
  ModelShelf shelf_;
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool is_over_ = false;  // of the worker
  std::thread worker_;    // last: it uses all the others
};

}  // namespace

int main(int argc, char** argv) {
  bool on_cpu = false, small = false;
  for (int i = 1; i < argc; ++i) {
    on_cpu |= std::strcmp(argv[i], "--cpu") == 0;
    small |= std::strcmp(argv[i], "--small") == 0;
  }
  try {
    // 2 GiB a model, and room for about three of them.
    const ModelSize size = small || on_cpu ? ModelSize{256, 2} : ModelSize{8192, 8};
    const std::int64_t rows = 64;
    gpumemx::install_allocator({{"cap", "7GiB"}});
    const torch::Device device(on_cpu ? torch::kCPU : torch::kCUDA);
    // What CUDA and its libraries need themselves is there once something was computed.
    (void)torch::mm(torch::ones({8, 8}, device), torch::ones({8, 8}, device)).sum().item<float>();
    gpumemx::clear_cache(gpumemx::kCurrentDevice, true);
    const gpumemx::MemoryInfo before = gpumemx::memory_info();
    std::printf("before: %.2f GiB free on the device\n", gib(before.free));

    {
      Server server(size, device);
      for (const char* model : {"summary", "translate", "classify", "rank", "summary"}) {
        const float answer = server.ask(model, torch::ones({rows, size.width})).get();
        std::printf("%-10s answered %.6f\n", model, static_cast<double>(answer));
      }
      std::cout << gpumemx::memory_summary() << '\n';

      server.unload_all();
      const gpumemx::Released released = gpumemx::clear_cache(gpumemx::kCurrentDevice, true);
      std::printf("unloaded all: %s\n", released.text.c_str());
    }
    const gpumemx::MemoryInfo after = gpumemx::memory_info();
    std::printf(
        "after: %.2f GiB free on the device, %.2f GiB less than before: %.3f GiB reserved for "
        "what is live (workspaces of cuBLAS), the rest is code that CUDA has loaded\n",
        gib(after.free), gib(before.free) - gib(after.free), gib(after.reserved));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "inference_server: %s\n", error.what());
    return 1;
  }
  return 0;
}
