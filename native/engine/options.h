// Validation of EngineOptions.
#pragma once

namespace crossrail {

struct EngineOptions;

// Throws UsageError that names the option, its value and the bound.
void check_options(const EngineOptions& options);

}  // namespace crossrail
