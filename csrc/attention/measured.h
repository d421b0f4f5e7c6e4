#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "attention/call.h"
#include "cuseq/macros.h"

// The measurements that the choice of a backend follows. `python -m benchmarks attention_backends`
// takes them and Python loads them; without Python there are none.
namespace cuseq::attention {

// The facts of a call that decide how fast a backend is.
struct Facts {
  int64_t sm = 0;         // compute capability, such as 90; 0 on the CPU
  bool half = false;      // fp16 or bf16
  int64_t head_dim = 0;   // the larger one of q and v
  std::string mask;       // see Call::mask
  int64_t window = 0;     // keys that a query sees; 0 without a window
  std::string mode;       // "eager", "compiled" or "captured"
  int64_t tokens = 0;     // of the row
  int64_t sequences = 0;  // 0 if unknown; those that the offsets have room for if captured
};

struct Measured {
  Facts facts;
  std::map<std::string, double, std::less<>> us;  // forward and backward, by backend
};

// Return the compute capability of a tensor's GPU, such as 90; 0 for one on the CPU.
int64_t capability_of(const Tensor& tensor);

// Return the facts of a call.
Facts facts_of(const Call& call);

// Replace the measurements.
CUSEQ_API void set_measured(std::vector<Measured> rows);

// Return the row that is closest to the facts, of those that measured the backend if one is named.
// Null if nothing comparable was measured.
CUSEQ_API const Measured* closest_measured(const Facts& facts, std::string_view backend = {});

// Return the row that decides about a call, of those that measured the backend if one is named: the
// closest one, or where none has its mask, the closest with a plain causal mask, which is closer
// than no measurement. Spans and soft caps are not like it: most backends do not take them.
CUSEQ_API const Measured* measured_like(const Facts& facts, std::string_view backend = {});

}  // namespace cuseq::attention
