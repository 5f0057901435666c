#include "core/rng.h"

#include <cmath>

namespace lockstep {

float Philox::normal() {
  const double u1 = uniform(), u2 = uniform();
  return static_cast<float>(std::sqrt(-2.0 * std::log(u1)) * std::cos(6.283185307179586 * u2));
}

}  // namespace lockstep
