"""Trains a little under Accelerate, which knows torchrun's variables and not ours."""

import accelerate
import torch

accelerator = accelerate.Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for inputs, targets in data:
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
print(accelerator.num_processes, ranks, accelerator.distributed_type.value)
accelerator.end_training()
