#include "attention/composition.h"

#include <algorithm>
#include <vector>

namespace cuseq::attention {
namespace {

std::vector<Composition>& compositions() {
  static auto* all = new std::vector<Composition>();
  return *all;
}

const Composition* composition_of(const Row& row) {
  const auto found =
      std::ranges::find_if(compositions(), [&](const Composition& one) { return one.fits(row); });
  return found == compositions().end() ? nullptr : &*found;
}

}  // namespace

RegisterComposition::RegisterComposition(const Composition& composition) {
  compositions().push_back(composition);
}

Output attend(const Row& row) {
  const Composition* composition = composition_of(row);
  return composition == nullptr ? attend(row.call) : composition->forward(row);
}

Gradients attend_backward(const Row& row, const Outer& outer) {
  const Composition* composition = composition_of(row);
  return composition == nullptr ? attend_backward(row.call, outer)
                                : composition->backward(row, outer);
}

}  // namespace cuseq::attention
