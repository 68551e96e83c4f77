#include "generator.h"

#include "graphs.h"
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
        position_{seed, 0} {}

  static c10::DeviceType device_type() { return c10::DeviceType::CUDA; }

  void set_current_seed(uint64_t seed) override { position_ = {seed, 0}; }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % kStep == 0, "offset must be a multiple of 4");
    position_.offset = offset;
  }
  uint64_t get_offset() const override { return position_.offset; }
  uint64_t current_seed() const override { return position_.seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return position_.seed;
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == kStateBytes && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "RNG state is wrong size");
    const auto* from = static_cast<const char*>(state.data());
    std::memcpy(&position_, from, sizeof(position_));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::TensorBase state = at::detail::empty_cpu({kStateBytes}, at::kByte, std::nullopt,
                                                 std::nullopt, std::nullopt, std::nullopt);
    auto* to = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(to, &position_, sizeof(position_));
    return state.getIntrusivePtr();
  }

  uint64_t next_stream() {
    TORCH_CHECK(replay_ || is_captured_ == is_recording(),
                is_captured_ ? "Offset increment outside graph capture encountered unexpectedly."
                             : "RNG op in a graph whose generator is not registered");
    Position& at = replay_ ? *replay_ : position_;
    // SplitMix64 of both, so that neighbouring offsets give unlike streams.
    uint64_t mixed = at.seed + 0x9E3779B97F4A7C15 * (at.offset + 1);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    at.offset += kStep;
    return mixed ^ (mixed >> 31);
  }
  void give_back() { (replay_ ? *replay_ : position_).offset -= kStep; }

  // What a capture draws is drawn in each replay.
  void begin_capture() {
    is_captured_ = true;
    before_ = position_;
  }
  uint64_t end_capture() {
    is_captured_ = false;
    const uint64_t drawn = position_.offset - before_.offset;
    position_ = before_;
    return drawn;
  }
  // Takes the numbers of a replay, which draws them when it runs.
  Position take(uint64_t drawn) {
    const Position from = position_;
    position_.offset += drawn;
    return from;
  }
  void draw_from(std::optional<Position> position) { replay_ = position; }

  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    position_ = static_cast<const Generator&>(*state).position_;
    is_captured_ = false;
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(0);
    copy->position_ = is_captured_ ? before_ : position_;
    return copy;
  }

  Position position_, before_{};
  bool is_captured_ = false;
  std::optional<Position> replay_;  // while a replay runs
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

namespace {
Generator& captured_generator() { return *default_generator().get<Generator>(); }
}  // namespace

void begin_captured_draws() { captured_generator().begin_capture(); }
uint64_t end_captured_draws() { return captured_generator().end_capture(); }
Position take_draws(uint64_t drawn) { return captured_generator().take(drawn); }
void draw_from(std::optional<Position> position) { captured_generator().draw_from(position); }

}  // namespace emulated
