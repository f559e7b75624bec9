"""The other end of a path, made of nothing but pyverbs: it shows that the verbs NIC speaks plain verbs.

Run by tests/native/test_verbs_interop.cc in the virtual machine, with the system's Python, for which Debian has
python3-pyverbs. One command a line on stdin, one answer a line on stdout; bytes are in hexadecimal.
"""

import struct
import sys
import time

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.enums import (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_MTU_1024,
    IBV_QPT_RC,
    IBV_SEND_SIGNALED,
    IBV_WC_SUCCESS,
    IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_SEND,
)
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

# version, fabric, mtu, prefix bits, lid, partition, global route, gid, datagram queue pair and key
ENDPOINT = struct.Struct("<BBBBHHB16sII")
OFFER = struct.Struct("<BBIIII")  # version, reads at once, then queue pair and first packet: messages, works
BYTES = 1 << 20
GID_INDEX = 1
PORT = 1
PATIENCE_S = 10


class Peer:
    def __init__(self, device: str) -> None:
        self.context = Context(name=device)
        self.domain = PD(self.context)
        access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ
        self.memory = MR(self.domain, BYTES, access)
        self.completions = CQ(self.context, 256)
        cap = QPCap(max_send_wr=32, max_recv_wr=64, max_send_sge=1, max_recv_sge=1)
        self.queue_pairs = []
        for _ in ("messages", "works"):
            wanted = QPInitAttr(qp_type=IBV_QPT_RC, scq=self.completions, rcq=self.completions, cap=cap)
            attributes = QPAttr(port_num=PORT)
            attributes.qp_access_flags = access
            self.queue_pairs.append(QP(self.domain, wanted, attributes))
        self.messages, self.works = self.queue_pairs

    def describe(self) -> str:
        gid = bytes(
            int(part, 16)
            for group in str(self.context.query_gid(PORT, GID_INDEX)).split(":")
            for part in (group[:2], group[2:])
        )
        endpoint = ENDPOINT.pack(2, 2, IBV_MTU_1024, 24, 0, 0xFFFF, 1, gid, 0, 0)
        offer = OFFER.pack(1, 4, self.messages.qp_num, 100, self.works.qp_num, 200)
        return f"{endpoint.hex()} {offer.hex()} {self.memory.buf} {self.memory.rkey}"

    def connect(self, endpoint: str, offer: str) -> str:
        gid = ENDPOINT.unpack(bytes.fromhex(endpoint))[7]
        _, _, message_number, message_psn, work_number, work_psn = OFFER.unpack(bytes.fromhex(offer))
        far = [(message_number, message_psn, 100), (work_number, work_psn, 200)]
        groups = gid.hex(":", 2)
        for queue_pair, (number, psn, own_psn) in zip(self.queue_pairs, far, strict=True):
            route = GlobalRoute(dgid=GID(groups), sgid_index=GID_INDEX)
            attributes = QPAttr(port_num=PORT)
            attributes.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
            attributes.dest_qp_num = number
            attributes.rq_psn = psn
            attributes.sq_psn = own_psn
            attributes.path_mtu = IBV_MTU_1024
            attributes.max_dest_rd_atomic = 4
            attributes.max_rd_atomic = 4
            attributes.min_rnr_timer = 4
            attributes.timeout = 14
            attributes.retry_cnt = 6
            attributes.rnr_retry = 7
            queue_pair.to_rts(attributes)
        return "connected"

    def write(self, address: str, key: str, length: str, imm: str) -> str:
        self.memory.write(b"p" * int(length), int(length))
        return self.operate(IBV_WR_RDMA_WRITE_WITH_IMM, int(address), int(key), int(length), int(imm))

    def read(self, address: str, key: str, length: str) -> str:
        done = self.operate(IBV_WR_RDMA_READ, int(address), int(key), int(length), 0)
        return f"{done} {self.memory.read(8, 0).hex()}"

    def operate(self, opcode: int, address: int, key: int, length: int, imm: int) -> str:
        entry = SGE(self.memory.buf, length, self.memory.lkey)
        request = SendWR(wr_id=1, sg=[entry], num_sge=1, opcode=opcode, send_flags=IBV_SEND_SIGNALED)
        # pyverbs puts the immediate on the wire as it is given: verbs wants it in network order.
        request.imm_data = int.from_bytes(imm.to_bytes(4, "big"), sys.byteorder)
        request.set_wr_rdma(key, address)
        self.works.post_send(request)
        return str(self.completion().status)

    def send(self, text: str) -> str:
        self.memory.write(text.encode(), len(text))
        entry = SGE(self.memory.buf, len(text), self.memory.lkey)
        request = SendWR(wr_id=2, sg=[entry], num_sge=1, opcode=IBV_WR_SEND, send_flags=IBV_SEND_SIGNALED)
        self.messages.post_send(request)
        return str(self.completion().status)

    def receive(self) -> str:
        """Ready for one immediate and one message, the message's bytes at the end of the memory."""
        # pyverbs makes no receive without memory; an immediate of a write leaves it alone.
        unused = SGE(self.memory.buf + BYTES - 8192, 4096, self.memory.lkey)
        self.works.post_recv(RecvWR(wr_id=3, sg=[unused], num_sge=1))
        entry = SGE(self.memory.buf + BYTES - 4096, 4096, self.memory.lkey)
        self.messages.post_recv(RecvWR(wr_id=4, sg=[entry], num_sge=1))
        return "ready"

    def immediate(self) -> str:
        completion = self.completion()
        imm = int.from_bytes(completion.imm_data.to_bytes(4, sys.byteorder), "big")
        return f"{completion.status} {completion.wr_id} {completion.byte_len} {imm} {self.memory.read(8, 0).hex()}"

    def message(self) -> str:
        completion = self.completion()
        text = self.memory.read(completion.byte_len, BYTES - 4096)
        return f"{completion.status} {completion.wr_id} {bytes(text).decode()}"

    def completion(self):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            count, found = self.completions.poll()
            if count:
                return found[0]
        raise TimeoutError(f"no completion in {PATIENCE_S} s")


def main() -> None:
    peer = Peer(sys.argv[1])
    assert IBV_WC_SUCCESS == 0
    for line in sys.stdin:
        name, *arguments = line.split()
        print(getattr(peer, name)(*arguments), flush=True)


if __name__ == "__main__":
    main()
