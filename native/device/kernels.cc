#include "device/kernels.h"

#include <map>
#include <mutex>
#include <string>

#include "device/capture.h"
#include "util/errors.h"

namespace crossrail::device {

namespace {

constexpr int kComputeCapability = 75;    // cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeCapabilityMin = 7;  // fence and red with a scope

static_assert(kPiecesPerLaunch * sizeof(Piece) == 4080);  // below; at most 4096

// add_to_word: the kernels before it in the stream have ended, and the fence orders what they wrote before the addition for
// the whole system: whoever reads the sum with acquire, on the CPU, sees their writes, and so does what it then starts. It
// pairs with the acquire of WatcherThread::look_at and Watcher::value.
//
// copy_pieces: block (x, y) has part y of piece x. Thread i of all of a piece's takes units i, i + stride, ..., so that
// neighbours access neighbours. First units of 16 bytes, as many as there are whole ones and the ends allow, then bytes.
// open_round, publish_round, await_round: of two words on lines of their own that of the round's parity; see round_words.h. The
// acquire of a wait, and the fence before a store, are for the whole system, and so pair with the CPU's release and acquire
// in StreamProxy. What kernels that follow in the stream read is ordered by the end of this one.
constexpr const char* kImage = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry crossrail_add_to_word(.param .u64 word, .param .u64 delta)
{
  .reg .u64 %address;
  .reg .u64 %delta;
  ld.param.u64 %address, [word];
  ld.param.u64 %delta, [delta];
  cvta.to.global.u64 %address, %address;
  fence.acq_rel.sys;
  red.relaxed.sys.global.add.u64 [%address], %delta;
  ret;
}
.visible .entry crossrail_copy_pieces(.param .align 8 .b8 pieces[4080])
{
  .reg .pred %odd, %over;
  .reg .b32 %block, %part, %parts, %thread, %threads, %first, %step;
  .reg .b32 %a, %b, %c, %d;
  .reg .b16 %byte;
  .reg .b64 %piece, %to, %from, %bytes, %ends, %units, %unit, %stride, %at, %source, %target;
  mov.u32 %block, %ctaid.x;
  mul.wide.u32 %at, %block, 24;
  mov.b64 %piece, pieces;
  add.u64 %piece, %piece, %at;
  ld.param.u64 %to, [%piece];
  ld.param.u64 %from, [%piece+8];
  ld.param.u64 %bytes, [%piece+16];
  cvta.to.global.u64 %to, %to;
  cvta.to.global.u64 %from, %from;
  mov.u32 %part, %ctaid.y;
  mov.u32 %parts, %nctaid.y;
  mov.u32 %thread, %tid.x;
  mov.u32 %threads, %ntid.x;
  mad.lo.u32 %first, %part, %threads, %thread;
  mul.lo.u32 %step, %parts, %threads;
  cvt.u64.u32 %stride, %step;
  or.b64 %ends, %to, %from;
  and.b64 %ends, %ends, 15;
  setp.ne.u64 %odd, %ends, 0;
  shr.u64 %units, %bytes, 4;
  selp.u64 %units, 0, %units, %odd;
  cvt.u64.u32 %unit, %first;
wide:
  setp.ge.u64 %over, %unit, %units;
  @%over bra rest;
  shl.b64 %at, %unit, 4;
  add.u64 %source, %from, %at;
  add.u64 %target, %to, %at;
  ld.global.v4.u32 {%a, %b, %c, %d}, [%source];
  st.global.v4.u32 [%target], {%a, %b, %c, %d};
  add.u64 %unit, %unit, %stride;
  bra wide;
rest:
  shl.b64 %units, %units, 4;
  cvt.u64.u32 %unit, %first;
  add.u64 %unit, %unit, %units;
narrow:
  setp.ge.u64 %over, %unit, %bytes;
  @%over bra done;
  add.u64 %source, %from, %unit;
  add.u64 %target, %to, %unit;
  ld.global.u8 %byte, [%source];
  st.global.u8 [%target], %byte;
  add.u64 %unit, %unit, %stride;
  bra narrow;
done:
  ret;
}
.visible .entry crossrail_open_round(.param .u64 rounds, .param .u64 number, .param .u64 words)
{
  .reg .pred %come, %over;
  .reg .u64 %rounds, %number, %word, %round, %now;
  ld.param.u64 %rounds, [rounds];
  ld.param.u64 %number, [number];
  ld.param.u64 %word, [words];
  cvta.to.global.u64 %rounds, %rounds;
  cvta.to.global.u64 %number, %number;
  cvta.to.global.u64 %word, %word;
  atom.relaxed.gpu.global.add.u64 %round, [%rounds], 1;
  add.u64 %round, %round, 1;
  st.global.u64 [%number], %round;
  and.b64 %now, %round, 1;
  shl.b64 %now, %now, 6;
  add.u64 %word, %word, %now;
  st.relaxed.sys.global.u64 [%word+128], %round;
again:
  ld.acquire.sys.global.u64 %now, [%word];
  setp.ge.u64 %come, %now, %round;
  @%come bra opened;
  nanosleep.u32 100;
  bra again;
opened:
  setp.eq.u64 %over, %now, 0xffffffffffffffff;
  @%over st.global.u64 [%number], %now;
  ret;
}
.visible .entry crossrail_publish_round(.param .u64 number, .param .u64 words)
{
  .reg .u64 %number, %word, %round, %line;
  ld.param.u64 %number, [number];
  ld.param.u64 %word, [words];
  cvta.to.global.u64 %number, %number;
  cvta.to.global.u64 %word, %word;
  ld.global.u64 %round, [%number];
  and.b64 %line, %round, 1;
  shl.b64 %line, %line, 6;
  add.u64 %word, %word, %line;
  fence.acq_rel.sys;
  st.relaxed.sys.global.u64 [%word], %round;
  ret;
}
.visible .entry crossrail_await_round(.param .u64 number, .param .u64 words)
{
  .reg .pred %come, %over;
  .reg .u64 %number, %word, %round, %now;
  ld.param.u64 %number, [number];
  ld.param.u64 %word, [words];
  cvta.to.global.u64 %number, %number;
  cvta.to.global.u64 %word, %word;
  ld.global.u64 %round, [%number];
  and.b64 %now, %round, 1;
  shl.b64 %now, %now, 6;
  add.u64 %word, %word, %now;
again:
  ld.acquire.sys.global.u64 %now, [%word];
  setp.ge.u64 %come, %now, %round;
  @%come bra here;
  nanosleep.u32 100;
  bra again;
here:
  setp.eq.u64 %over, %now, 0xffffffffffffffff;
  @%over st.global.u64 [%number], %now;
  ret;
}
)";

constexpr const char* kUpdate = "update NVIDIA's driver; see nvidia-smi";

Kernels load(const Driver& driver, int gpu, const char* what_for) {
  const std::string on = " on GPU " + std::to_string(gpu);
  int capability = 0;
  if (const int code = driver.device_attribute(&capability, kComputeCapability, gpu); code != 0)
    fail(driver, "cuDeviceGetAttribute", code, "cannot ask for the compute capability" + on, kUpdate);
  if (capability < kComputeCapabilityMin) {
    throw TransportError("launch", 0,
                         std::string(what_for) + " takes compute capability " + std::to_string(kComputeCapabilityMin) +
                             ".0 (Volta) or newer, and there is " + std::to_string(capability) + ".x" + on,
                         "take a newer GPU");
  }
  const OutsideCapture outside(driver);
  void* module = nullptr;
  if (const int code = driver.load_module(&module, kImage); code != 0)
    fail(driver, "cuModuleLoadData", code, std::string("cannot load ") + what_for + on, kUpdate);
  Kernels kernels;
  for (const auto& [name, kernel] : {std::pair{"crossrail_add_to_word", &kernels.add_to_word},
                                     std::pair{"crossrail_copy_pieces", &kernels.copy_pieces},
                                     std::pair{"crossrail_open_round", &kernels.open_round},
                                     std::pair{"crossrail_publish_round", &kernels.publish_round},
                                     std::pair{"crossrail_await_round", &kernels.await_round}}) {
    if (const int code = driver.module_function(kernel, module, name); code != 0)
      fail(driver, "cuModuleGetFunction", code, std::string("cannot find ") + what_for + on, kUpdate);
  }
  return kernels;
}

}  // namespace

const Kernels& kernels_of(const Driver& driver, int gpu, const char* what_for) {
  static std::mutex mutex;
  static std::map<int, Kernels> loaded;
  static const Driver* of = nullptr;
  const std::lock_guard lock(mutex);
  if (of != &driver) loaded.clear();  // another double
  of = &driver;
  if (const auto it = loaded.find(gpu); it != loaded.end()) return it->second;
  return loaded[gpu] = load(driver, gpu, what_for);
}

}  // namespace crossrail::device
