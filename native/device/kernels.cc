#include "device/kernels.h"

#include <map>
#include <mutex>
#include <string>

#include "device/capture.h"
#include "util/errors.h"

namespace crossrail::device {

namespace {

constexpr int kComputeCapability = 75;    // cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeCapabilityMin = 7;  // has fences and reductions with a scope

static_assert(kPiecesPerLaunch * sizeof(Piece) == 4080);  // below; at most 4096

// add_to_word: the kernels before it in the stream have ended, and the fence orders what they wrote before the
// addition, for the whole system: whoever reads the sum with acquire, on the CPU, sees their writes, and so does
// whatever it then starts. It pairs with the acquire of WatcherThread::look_at and Watcher::value.
//
// await_counts: given, taken and missed are at offsets 0, 64 and 72 of CountWords. The acquire pairs with the release
// of CountFlag::give; reads of later kernels in the stream are ordered by the end of this one. taken and missed are
// stored for later kernels, and for a CPU that has waited for the stream.
//
// copy_pieces: block (x, y) copies part y of piece x. Thread i of all threads on a piece takes units i, i + stride,
// ..., so that neighbouring threads access neighbouring units. First units of 16 bytes, as many whole ones as the
// alignment allows, then bytes.
//
// open_round, publish_round, await_round: use the word of the round's parity, of two words on cache lines of their own;
// see round_words.h. The acquire of a wait, and the fence before a store, are system-wide, and so pair with the CPU's
// release and acquire in StreamProxy, and between signals. Reads of later kernels in the stream are ordered by the end
// of this one. The signals are split over the threads of a warp, i, i + 32, ...; the word, which is across PCIe, is
// polled first, then every sixteenth time, and as soon as only it is missing.
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
.visible .entry crossrail_await_counts(.param .u64 words, .param .u64 count, .param .u64 timeout)
{
  .reg .pred %come, %over;
  .reg .u64 %words, %count, %timeout, %given, %wanted, %missed, %begin, %now, %ended;
  ld.param.u64 %words, [words];
  ld.param.u64 %count, [count];
  ld.param.u64 %timeout, [timeout];
  cvta.to.global.u64 %words, %words;
  ld.relaxed.sys.global.u64 %missed, [%words+72];
  setp.ne.u64 %over, %missed, 0;
  @%over bra done;
  ld.relaxed.sys.global.u64 %wanted, [%words+64];
  add.u64 %wanted, %wanted, %count;
  mov.u64 %begin, %globaltimer;
again:
  ld.acquire.sys.global.u64 %given, [%words];
  and.b64 %ended, %given, 0x8000000000000000;
  xor.b64 %given, %given, %ended;
  setp.ge.u64 %come, %given, %wanted;
  @%come bra come;
  setp.ne.u64 %over, %ended, 0;
  @%over bra missed;
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %begin;
  setp.ge.u64 %over, %now, %timeout;
  @%over bra missed;
  nanosleep.u32 100;
  bra again;
missed:
  or.b64 %count, %count, %ended;
  st.relaxed.sys.global.u64 [%words+72], %count;
  bra done;
come:
  st.relaxed.sys.global.u64 [%words+64], %wanted;
done:
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
.visible .entry crossrail_open_round(.param .u64 rounds, .param .u64 number, .param .u64 free, .param .u64 asked)
{
  .reg .pred %come, %over;
  .reg .u64 %rounds, %number, %word, %asked, %round, %now;
  ld.param.u64 %rounds, [rounds];
  ld.param.u64 %number, [number];
  ld.param.u64 %word, [free];
  ld.param.u64 %asked, [asked];
  cvta.to.global.u64 %rounds, %rounds;
  cvta.to.global.u64 %number, %number;
  cvta.to.global.u64 %word, %word;
  cvta.to.global.u64 %asked, %asked;
  atom.relaxed.gpu.global.add.u64 %round, [%rounds], 1;
  add.u64 %round, %round, 1;
  st.global.u64 [%number], %round;
  and.b64 %now, %round, 1;
  shl.b64 %now, %now, 6;
  add.u64 %word, %word, %now;
  add.u64 %asked, %asked, %now;
  st.relaxed.sys.global.u64 [%asked], %round;
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
.visible .entry crossrail_publish_round(.param .u64 number, .param .u64 table, .param .u64 count, .param .u64 words)
{
  .reg .pred %over, %first;
  .reg .b32 %thread;
  .reg .u64 %number, %table, %count, %word, %round, %parity, %line, %index, %at;
  ld.param.u64 %number, [number];
  ld.param.u64 %table, [table];
  ld.param.u64 %count, [count];
  ld.param.u64 %word, [words];
  cvta.to.global.u64 %number, %number;
  cvta.to.global.u64 %word, %word;
  ld.global.u64 %round, [%number];
  and.b64 %parity, %round, 1;
  shl.b64 %line, %parity, 6;
  add.u64 %word, %word, %line;
  mov.u32 %thread, %tid.x;
  cvt.u64.u32 %index, %thread;
  setp.eq.u64 %first, %index, 0;
  fence.acq_rel.sys;
  setp.eq.u64 %over, %round, 0xffffffffffffffff;
  @%over bra told;
  mul.lo.u64 %at, %parity, %count;
  shl.b64 %at, %at, 3;
  add.u64 %table, %table, %at;
tell:
  setp.ge.u64 %over, %index, %count;
  @%over bra told;
  shl.b64 %at, %index, 3;
  add.u64 %at, %table, %at;
  ld.u64 %at, [%at];
  st.relaxed.sys.u64 [%at], %round;
  add.u64 %index, %index, 32;
  bra tell;
told:
  @%first st.relaxed.sys.global.u64 [%word], %round;
  ret;
}
.visible .entry crossrail_await_round(.param .u64 number, .param .u64 table, .param .u64 count, .param .u64 needs_words,
                                      .param .u64 words)
{
  .reg .pred %come, %over, %signalled, %needed, %skips;
  .reg .b32 %thread, %looks, %rest;
  .reg .u64 %number, %table, %count, %needs, %word, %round, %parity, %now, %first, %index, %at;
  ld.param.u64 %number, [number];
  ld.param.u64 %table, [table];
  ld.param.u64 %count, [count];
  ld.param.u64 %needs, [needs_words];
  ld.param.u64 %word, [words];
  cvta.to.global.u64 %number, %number;
  cvta.to.global.u64 %word, %word;
  ld.global.u64 %round, [%number];
  and.b64 %parity, %round, 1;
  shl.b64 %now, %parity, 6;
  add.u64 %word, %word, %now;
  mul.lo.u64 %at, %parity, %count;
  shl.b64 %at, %at, 3;
  add.u64 %table, %table, %at;
  setp.ne.u64 %needed, %needs, 0;
  mov.u32 %thread, %tid.x;
  cvt.u64.u32 %first, %thread;
  mov.u32 %looks, 0;
again:
  mov.u64 %index, %first;
  setp.eq.u64 %come, %index, %index;
look:
  setp.ge.u64 %over, %index, %count;
  @%over bra looked;
  shl.b64 %at, %index, 3;
  add.u64 %at, %table, %at;
  ld.u64 %at, [%at];
  ld.acquire.sys.u64 %now, [%at];
  setp.ge.u64 %come, %now, %round;
  @!%come bra looked;
  add.u64 %index, %index, 32;
  bra look;
looked:
  vote.sync.all.pred %signalled, %come, 0xffffffff;
  not.pred %skips, %needed;
  and.pred %skips, %skips, %signalled;
  @%skips bra done;
  and.b32 %rest, %looks, 15;
  add.u32 %looks, %looks, 1;
  setp.ne.u32 %skips, %rest, 0;
  not.pred %over, %signalled;
  and.pred %skips, %skips, %over;
  @%skips bra pause;
  ld.acquire.sys.global.u64 %now, [%word];
  setp.eq.u64 %over, %now, 0xffffffffffffffff;
  @%over bra ended;
  setp.ge.u64 %come, %now, %round;
  and.pred %come, %come, %signalled;
  @%come bra done;
pause:
  nanosleep.u32 40;
  bra again;
ended:
  st.global.u64 [%number], %now;
done:
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
                                     std::pair{"crossrail_await_counts", &kernels.await_counts},
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
  static auto& loaded = *new std::map<int, Kernels>;  // as in CurrentContext
  static const Driver* of = nullptr;
  const std::lock_guard lock(mutex);
  if (of != &driver) loaded.clear();  // a different test double
  of = &driver;
  if (const auto it = loaded.find(gpu); it != loaded.end()) return it->second;
  return loaded[gpu] = load(driver, gpu, what_for);
}

}  // namespace crossrail::device
