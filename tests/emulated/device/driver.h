// How the test device works with the fake driver, where a test has asked for it: streams and events
// are the driver's, and PyTorch's kernels take their turn among those that were launched.
#pragma once

namespace emulated {

struct Driver {
  int (*stream_create)(void** stream, unsigned flags);
  int (*stream_query)(void* stream);
  int (*stream_synchronize)(void* stream);
  int (*stream_wait_event)(void* stream, void* event, unsigned flags);
  int (*context_synchronize)();
  int (*event_create)(void** event, unsigned flags);
  int (*event_record)(void* event, void* stream);
  int (*event_query)(void* event);
  int (*event_synchronize)(void* event);
  int (*event_destroy)(void* event);
  int (*launch_host)(void* stream, void (*call)(void*), void* data);
  int (*error_string)(int error, const char** text);
  int (*set_current)(void* context);
  int (*begin_capture)(void* stream, int mode);
  int (*end_capture)(void* stream, void** graph);
  int (*instantiate)(void** executable, void* graph, unsigned long long flags);
  int (*launch_graph)(void* executable, void* stream);
  int (*destroy_graph)(void* graph);
  int (*destroy_executable)(void* executable);
  int (*is_capturing)(void* stream, int* status);
  void (*run_stream)(void* stream);
  void (*add_node)(void* stream, void (*call)(void*), void* data, void (*drop)(void*));
  void (*invalidate)(void* stream);
  void* context = nullptr;
};

// nullptr: there is none. Its context is current on this thread from now on.
const Driver* driver();

// Raises in PyTorch's words if a call was refused.
void check(int result);

// This thread's stream.
void* current_stream();
// Runs what was launched on this thread's stream: before a kernel of PyTorch's on the same stream.
void run_launched();

}  // namespace emulated
