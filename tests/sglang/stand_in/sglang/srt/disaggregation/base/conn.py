"""The base classes of a transfer backend."""

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass


class KVArgs:
    pass


class KVTransferDestination(str, enum.Enum):
    DEVICE = "device"
    HOST = "host"


class KVPoll:
    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


@dataclass
class KVTransferMetric:
    transfer_latency_s: float | None = None
    alloc_latency_s: float | None = None
    transfer_total_bytes: int | None = None


class BaseKVManager(ABC):
    enable_deferred_decode_kv_release = False
    supports_host_destination = False

    def should_verify_kv_checksum(self, bootstrap_addr):
        return True

    @abstractmethod
    def __init__(self, args, disaggregation_mode, server_args, is_mla_backend=False): ...

    @abstractmethod
    def register_to_bootstrap(self): ...


class BaseKVSender(ABC):
    @abstractmethod
    def __init__(self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=False): ...

    @abstractmethod
    def init(self, num_kv_indices, aux_index=None): ...

    @abstractmethod
    def send(self, kv_indices, state_indices=None, num_kv_tokens=None): ...

    def mark_prefill_complete(self):
        raise NotImplementedError

    def pop_decode_prefix_len(self):
        return 0

    def get_max_transfer_tokens(self):
        return None

    def should_send_kv_chunk(self, num_pages, last_chunk):
        return num_pages > 0

    @abstractmethod
    def get_transfer_metric(self): ...

    @abstractmethod
    def poll(self): ...

    @abstractmethod
    def failure_exception(self): ...

    def clear(self):  # noqa: B027
        pass

    def abort(self):  # noqa: B027
        pass


class BaseKVReceiver(ABC):
    @property
    def supports_host_destination(self):
        return False

    @abstractmethod
    def __init__(self, mgr, bootstrap_addr, bootstrap_room=None): ...

    @abstractmethod
    def init(self, prefill_dp_rank): ...

    @abstractmethod
    def send_metadata(
        self,
        kv_indices,
        aux_index=None,
        state_indices=None,
        decode_prefix_len=None,
        destination=KVTransferDestination.DEVICE,
    ): ...

    @abstractmethod
    def poll(self): ...

    @abstractmethod
    def failure_exception(self): ...

    def clear(self):  # noqa: B027
        pass

    def abort(self):  # noqa: B027
        pass


class BaseKVBootstrapServer(ABC):
    @abstractmethod
    def __init__(self, host, port): ...
