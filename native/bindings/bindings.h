// The parts of crossrail._core, one register function per public header. They convert and forward, nothing more.
#pragma once

#include <nanobind/nanobind.h>

namespace crossrail::bindings {

class EngineHandle;

void register_errors(nanobind::module_& module);
void register_descriptor(nanobind::module_& module);
void register_notifier(nanobind::module_& module);
void register_transfer(nanobind::module_& module);
void register_region(nanobind::module_& module);
void register_dlpack(nanobind::module_& module);
void register_count_flag(nanobind::module_& module);
void register_imm_counter(nanobind::module_& module);
void register_recv_pool(nanobind::module_& module);
void register_watcher(nanobind::module_& module);
void register_devices(nanobind::module_& module);
void register_engine(nanobind::module_& module);
void register_operations(nanobind::class_<EngineHandle>& engine);  // the submits of engine.h
void register_mapping(nanobind::module_& module, nanobind::class_<EngineHandle>& engine);
void register_pinned(nanobind::module_& module);
void register_flight(nanobind::module_& module, nanobind::class_<EngineHandle>& engine);
void register_traffic(nanobind::class_<EngineHandle>& engine);
void register_poison(nanobind::module_& module);
void register_sim(nanobind::module_& module);
void register_kv(nanobind::module_& module);
void register_moe_kernels(nanobind::module_& module);
void register_moe_layout(nanobind::module_& module);        // into the module of register_moe_kernels
void register_moe_words(nanobind::module_& module);         // likewise
void register_moe_proxy(nanobind::module_& module);         // likewise
void register_moe_stream_proxy(nanobind::module_& module);  // likewise
void register_moe_node_sums(nanobind::module_& module);     // likewise
void register_weights(nanobind::module_& module);
void register_bench(nanobind::module_& module);
void register_bench_sockets(nanobind::module_& module);  // into the module of register_bench
void register_bench_fabric(nanobind::module_& module);   // likewise
void register_bench_moe(nanobind::module_& module);      // likewise

}  // namespace crossrail::bindings
