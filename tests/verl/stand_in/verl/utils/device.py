"""Where verl computes."""


def get_device_name() -> str:
    return "cpu"
