#pragma once

#include <optional>

#include "cuseq/cache.h"
#include "python/bindings.h"

// What the bindings of the cache share.
namespace cuseq::python {

// Notices the death of keys that have a Python wrapper.
IdentityCache::Watcher key_watcher();

// A hit, null otherwise. It keeps the GIL, since giving it up and queueing for it again costs more.
CachedValuePtr find_at_once(const CacheQuery& query);

// Where a value may be kept: the query's tensors as they are before it is made.
std::optional<Identities> identities_to_keep(const CacheQuery& query);

// Keeps the object with the tensors in it, unless `before` is empty.
void keep(const CacheQuery& query, std::optional<Identities> before,
          decltype(CachedValue::tensors) tensors, py::object object, bool outlives_scopes = false);

py::object object_of(const CachedValue& value);

// The facts that Python makes, one file with its own part of the module.
void bind_facts(py::module_& m);

}  // namespace cuseq::python
