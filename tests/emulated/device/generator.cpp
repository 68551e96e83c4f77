#include "generator.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>

namespace emulated {
namespace {

constexpr int64_t kStateBytes = 16;
// Philox gives four numbers at a time.
constexpr uint64_t kStep = 4;

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(uint64_t seed)
      : GeneratorImpl(c10::Device(c10::DeviceType::CUDA, 0),
                      c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        seed_(seed) {}

  static c10::DeviceType device_type() { return c10::DeviceType::CUDA; }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % kStep == 0, "offset must be a multiple of 4");
    offset_ = offset;
  }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == kStateBytes && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "RNG state is wrong size");
    const auto* from = static_cast<const char*>(state.data());
    std::memcpy(&seed_, from, sizeof(seed_));
    std::memcpy(&offset_, from + sizeof(seed_), sizeof(offset_));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::TensorBase state = at::detail::empty_cpu({kStateBytes}, at::kByte, std::nullopt,
                                                 std::nullopt, std::nullopt, std::nullopt);
    auto* to = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(to, &seed_, sizeof(seed_));
    std::memcpy(to + sizeof(seed_), &offset_, sizeof(offset_));
    return state.getIntrusivePtr();
  }

  uint64_t next_stream() {
    // SplitMix64 of both, so that neighbouring offsets give unlike streams.
    uint64_t mixed = seed_ + 0x9E3779B97F4A7C15 * (offset_ + 1);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    offset_ += kStep;
    return mixed ^ (mixed >> 31);
  }
  void give_back() { offset_ -= kStep; }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(seed_);
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_;
  uint64_t offset_ = 0;
};

}  // namespace

at::Generator make_generator(uint64_t seed) { return at::make_generator<Generator>(seed); }

at::Generator& default_generator() {
  static auto* each = new at::Generator(make_generator(c10::default_rng_seed_val));
  return *each;
}

uint64_t next_stream(at::Generator& generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get<Generator>()->next_stream();
}

void give_back(at::Generator& generator) {
  std::lock_guard lock(generator.mutex());
  generator.get<Generator>()->give_back();
}

}  // namespace emulated
