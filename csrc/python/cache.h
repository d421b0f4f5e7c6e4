#pragma once

#include <optional>

#include "cuseq/cache.h"
#include "python/bindings.h"

// Functions shared by the bindings of the cache.
namespace cuseq::python {

// Return the watcher that drops the entries of a key when its Python wrapper dies.
IdentityCache::Watcher key_watcher();

// Return the cached value, or null on a miss. It keeps the GIL, because releasing and reacquiring
// it costs more than the look-up.
CachedValuePtr find_at_once(const CacheQuery& query);

// Return the identities of the query's tensors, to be taken before the value is made; nullopt if
// the value may not be kept.
std::optional<Identities> identities_to_keep(const CacheQuery& query);

// Keep the object and the tensors in it under the identities `before`; do nothing if those are
// empty.
void keep(const CacheQuery& query, std::optional<Identities> before,
          decltype(CachedValue::tensors) tensors, py::object object, bool outlives_scopes = false);

py::object object_of(const CachedValue& value);

// Bind the facts whose values Python makes (facts.cpp).
void bind_facts(py::module_& m);

}  // namespace cuseq::python
