// Random numbers of the test device.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace emulated {

// A generator as CUDA has it: a seed and an offset are all of its state (16 bytes). Each kernel
// that draws takes a stream of its own from them, and moves the offset.
at::Generator make_generator(uint64_t seed);
at::Generator& default_generator();

// The seed of the stream of the next kernel. Who has not drawn from it gives it back.
uint64_t next_stream(at::Generator& generator);
void give_back(at::Generator& generator);

// Of the default generator, for graphs: what a capture draws is counted and drawn again in each
// replay, from where the generator is when the replay is asked for.
struct Position {
  uint64_t seed, offset;
};
void begin_captured_draws();
uint64_t end_captured_draws();
Position take_draws(uint64_t drawn);
void draw_from(std::optional<Position> position);  // nothing: from the generator itself

}  // namespace emulated
