DISAGG_TRANSFER_BACKEND_CHOICES = ["mooncake", "fake"]
add_disagg_transfer_backend_choices = DISAGG_TRANSFER_BACKEND_CHOICES.extend
