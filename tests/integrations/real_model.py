"""A worker with a real transformer: a small Llama of random weights, the same in every process. `test_real_model.py`
starts one that prefills and one that decodes; each keeps its cache in paged blocks of another shape.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvxfer
from examples.remote_worker import serve
from kvxfer.config import load
from kvxfer.geometry import fingerprint_of
from kvxfer.integrations.torch import cache_of, rehome

LAYERS, KV_HEADS, DIM = 4, 2, 16
BLOCKS = 24
SEED = 3


def made_model() -> Any:
    """Weights are large enough that keys and values decide the tokens: another cache gives other tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=1024,
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(index: int) -> Any:
    """Token ids of shape [1, n]: less than a block, some blocks and a part, whole blocks."""
    length = (11, 75, 128)[index]
    return torch.randint(4, 300, (1, length), generator=torch.Generator().manual_seed(index))


class Worker:
    """The model, a paged cache, and a client. Prefill: a tensor [blocks, 16 tokens, heads, dim] for keys and one for
    values of each layer. Decode: one allocation, of each layer [blocks, heads, 32 tokens, keys and values].
    """

    def __init__(self, role: str, socket: str) -> None:
        self.role, self.socket = role, socket
        self.model = made_model()
        # Its name changes in later versions of transformers.
        self.cache_name = next(
            name for name in ("past_key_values", "cache") if name in inspect.signature(self.model.forward).parameters
        )
        self.tokens = 16 if role == "prefill" else 32
        if role == "prefill":
            shape = (BLOCKS, self.tokens, KV_HEADS, DIM)
            self.tensors: dict[str, Any] = {
                f"layers.{i}": (torch.zeros(shape), torch.zeros(shape)) for i in range(LAYERS)
            }
        else:
            whole = torch.zeros(LAYERS, BLOCKS, KV_HEADS, self.tokens, 2 * DIM)
            self.tensors = {f"layers.{i}": whole[i] for i in range(LAYERS)}
        self.open = AsyncExitStack()

    async def connect(self, transport: str, fault_spec: str = "", own_memory: bool = False) -> dict[str, Any]:
        """A client with this transport alone; ``own_memory`` moves the cache into memory of the client."""
        flags = {"transports": [transport], "integrity": True, **({"fault_spec": fault_spec} if fault_spec else {})}
        config = load(flags=flags).config
        self.client = await self.open.enter_async_context(kvxfer.Client(self.socket, config=config))
        name = fingerprint_of(model="tiny-llama", seed=str(SEED))
        home = await rehome(self.client, self.tensors) if own_memory else None
        found = cache_of(self.tensors, axes="BNHD" if self.role == "prefill" else "BHNC", fingerprint=name)
        regions = home.regions if home is not None else await self.client.register_many(found.storages)
        (self.cache,) = found.bind(regions)
        self.home = home
        return {}

    async def close(self) -> dict[str, Any]:
        """Take the memory back, and end the client."""
        if self.home is not None:
            await self.home.release()
        else:
            for region in self.cache.regions:
                await region.release()
        del self.cache, self.home
        await self.open.aclose()
        return {}

    async def generate(self, number: int, steps: int) -> dict[str, Any]:
        """The tokens of transformers itself."""
        ids = prompt(number)
        mask = torch.ones_like(ids)
        out = await asyncio.to_thread(
            self.model.generate, ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0
        )
        return {"tokens": out[0, ids.shape[1] :].tolist()}

    async def prefill(self, number: int, blocks: Sequence[int]) -> dict[str, Any]:
        """Compute the prompt's cache into these blocks and publish it; the first token and the ticket."""
        ids = prompt(number)
        cache, first = DynamicCache(config=self.model.config), 0
        for chunk in ids.split(50, dim=1):
            first = self.forward(chunk, cache)
        for i, (keys, values) in enumerate(self.tensors.values()):
            for paged, computed in ((keys, cache.layers[i].keys), (values, cache.layers[i].values)):
                for token in range(ids.shape[1]):
                    paged[blocks[token // 16], token % 16] = computed[0, :, token]
        table = kvxfer.BlockTable.of(blocks, ids.shape[1])
        self.publication = self.client.publish(f"request {number}", self.cache, table, lease_s=60, retryable=True)
        ticket = await self.publication.__aenter__()
        return {"first": first, "ticket": ticket.to_json()}

    async def published(self) -> dict[str, Any]:
        """Wait until it was read."""
        await self.publication.__aexit__(None, None, None)
        return {}

    async def pull(self, number: int, ticket: str, blocks: Sequence[int]) -> dict[str, Any]:
        """Fetch the cache into these blocks."""
        table = kvxfer.BlockTable.of(blocks, prompt(number).shape[1])
        pulled = await self.client.pull(ticket, self.cache, table, timeout=30)
        return {"bytes": pulled.bytes, "transport": pulled.transport}

    async def decode(self, number: int, blocks: Sequence[int], first: int, steps: int) -> dict[str, Any]:
        """The next tokens, from what lies in these blocks."""
        length, cache = prompt(number).shape[1], DynamicCache(config=self.model.config)
        for i, tensor in enumerate(self.tensors.values()):
            both = torch.cat([tensor[block] for block in blocks], dim=1)[None, :, :length]
            cache.update(both[..., :DIM].contiguous(), both[..., DIM:].contiguous(), i)
        tokens = [first]
        while len(tokens) < steps:
            tokens.append(self.forward(torch.tensor([[tokens[-1]]]), cache))
        return {"tokens": tokens}

    async def clear(self) -> dict[str, Any]:
        """Forget all that was fetched."""
        for tensor in self.tensors.values():
            tensor.zero_()
        return {}

    def forward(self, ids: Any, cache: Any) -> int:
        """Run the model over these tokens; the next one."""
        with torch.inference_mode():
            out = self.model(input_ids=ids, use_cache=True, **{self.cache_name: cache})
        return int(out.logits[0, -1].argmax())


if __name__ == "__main__":
    asyncio.run(serve(Worker(*sys.argv[1:])))
