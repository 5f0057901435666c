"""Writes golden files like those in this folder, with Hugging Face transformers (DeepseekV4ForCausalLM) on a CPU.

    python3 generate.py OUT_DIR [CASE...]

Needs torch 2.11, transformers 5.17 and safetensors; not used by the build or the tests. Format: README.md beside this file.
"""

import json
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

SWA, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

BASE = dict(
    vocab_size=96, hidden_size=64, num_attention_heads=4, num_key_value_heads=1, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32, o_groups=2,
    o_lora_rank=16, sliding_window=8, index_n_heads=24, index_head_dim=16, index_topk=4, n_routed_experts=8, n_shared_experts=1,
    num_experts_per_tok=2, moe_intermediate_size=32, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5, swiglu_limit=10.0, hc_mult=4,
    hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, rope_theta=10000.0, compress_rope_theta=160000.0, max_position_embeddings=4096,
    tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)

# name: (config changes, layer types, hash layers, batch, length)
CASES = {
    "two_streams": (dict(hc_mult=2, compress_rates={CSA: 4, HCA: 12}), [SWA, CSA, HCA], 1, 3, 31),
    "one_stream": (dict(hc_mult=1, num_experts_per_tok=1, compress_rates={CSA: 4, HCA: 8}), [CSA, HCA], 0, 1, 26),
    "odd_widths": (dict(hidden_size=40, num_attention_heads=6, head_dim=20, qk_rope_head_dim=6, q_lora_rank=20, o_groups=3, o_lora_rank=7,
                        moe_intermediate_size=24, n_routed_experts=5, num_experts_per_tok=3, vocab_size=67, index_head_dim=10, sliding_window=5,
                        compress_rates={CSA: 4, HCA: 6}), [HCA, CSA, SWA, CSA], 2, 2, 41),
    "wide_rates": (dict(compress_rates={CSA: 8, HCA: 32}, index_topk=3, sliding_window=16), [CSA, HCA, CSA], 1, 2, 70),
    "short": (dict(compress_rates={CSA: 4, HCA: 16}), [CSA, HCA], 1, 3, 3),
    "all_entries": (dict(compress_rates={CSA: 4, HCA: 16}, index_topk=64, swiglu_limit=0.5), [CSA, CSA], 0, 1, 45),
}


def randomize(model, config, generator):
    with torch.no_grad():
        for name, p in list(model.named_parameters()) + list(model.named_buffers()):
            if "inv_freq" in name or "rotary" in name:
                continue
            if name.endswith("tid2eid"):
                for row in range(p.shape[0]):
                    p[row] = torch.randperm(config.n_routed_experts, generator=generator)[: p.shape[1]]
            elif p.dtype.is_floating_point:
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                if "norm" in name:
                    p.copy_(1 + 0.1 * noise)
                elif p.dim() >= 2:
                    p.copy_(0.12 * noise)
                else:
                    p.copy_(0.3 * noise)


def make(name, out_dir):
    changes, layer_types, num_hash, batch, length = CASES[name]
    mlp = ["hash_moe"] * num_hash + ["moe"] * (len(layer_types) - num_hash)
    config = DeepseekV4Config(**{**BASE, **changes}, num_hidden_layers=len(layer_types), layer_types=layer_types, mlp_layer_types=mlp)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    model = DeepseekV4ForCausalLM(config)
    randomize(model, config, generator)
    weights = {k: v.detach().clone() for k, v in list(model.named_parameters()) + list(model.named_buffers()) if "inv_freq" not in k and "rotary" not in k}
    model = model.double().eval()
    ids = torch.randint(2, config.vocab_size, (batch, length), generator=generator)
    out = model(ids, output_hidden_states=True, use_cache=False)
    logits = out.logits.double()
    logprob = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    loss = -logprob.mean()
    loss.backward()
    tensors = {"input_ids": ids, "logits.f64": logits.detach(), "logprob.f64": logprob.detach(), "loss.f64": loss.detach().reshape(1)}
    for k, v in weights.items():
        tensors["weight." + k] = v.float() if v.dtype.is_floating_point else v.long()
    for i, h in enumerate(out.hidden_states):
        tensors[f"hidden.{i}"] = h.detach().float()
    for k, p in model.named_parameters():
        if p.grad is not None:
            tensors["grad." + k] = p.grad.float()
    with torch.no_grad():
        cache, steps, at = None, [], max(1, length // 3)
        step = model(ids[:, :at], use_cache=True)
        steps.append(step.logits)
        for t in range(at, length):
            step = model(ids[:, t : t + 1], past_key_values=step.past_key_values, use_cache=True)
            steps.append(step.logits)
        tensors["decode_logits.f64"] = torch.cat(steps, 1).double()
    import transformers
    path = os.path.join(out_dir, name + ".safetensors")
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"config": json.dumps(config.to_dict(), default=str), "transformers": transformers.__version__})
    print(name, "loss", float(loss), "decode", float((tensors["decode_logits.f64"] - logits).abs().max()))


for case in sys.argv[2:] or CASES:
    try:
        make(case, sys.argv[1])
    except Exception as e:  # a case transformers itself refuses
        print(case, "failed:", repr(e)[:300])
