"""What a process of SGLang is told about itself; the tests put theirs in the place of these."""


def get_parallel():
    raise NotImplementedError


def get_serving():
    raise NotImplementedError


def get_disagg():
    raise NotImplementedError


def process_model_config():
    raise NotImplementedError
