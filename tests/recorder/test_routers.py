"The number of tokens of each expert is compared with routers of Hugging Face and with hand-written routers."
import warnings

import pytest
import torch
from same_training import train
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchember import EmberWarning, diagnose, torchEmber


def routers(te):
    "Return the rows about routers as a DataFrame."
    df = te.t.df
    return df[df.ttype=='router'].reset_index(drop=True)


def counts_of(te):
    "Return a list for each call of a router: the number of tokens of each expert."
    df = routers(te)
    df = df[df.tname!='router']
    return [[int(n) for n in rows.tokens] for _,rows in df.groupby(['step', 'path', 'call'], sort=False)]


def count(chosen, n): return torch.bincount(chosen.flatten(), minlength=n).tolist()


sizes = dict(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=24,
    max_position_embeddings=64)
latent = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=8, first_k_dense_replace=0, n_shared_experts=1, kv_lora_rank=8,
    q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, head_dim=4)
models = {
    'MixtralForCausalLM': dict(sizes, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    'Qwen2MoeForCausalLM': dict(sizes, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        output_router_logits=True),
    'DeepseekV2ForCausalLM': dict(sizes | latent, n_group=4, topk_group=2, topk_method='group_limited_greedy'),
    'DeepseekV3ForCausalLM': dict(sizes | latent, n_group=1, topk_group=1, num_experts_per_tok=3),
    'GptOssForCausalLM': dict(sizes, num_local_experts=4, num_experts_per_tok=2, head_dim=4)}


@pytest.mark.parametrize('name', models)
def test_counts_equal_those_of_the_routers(name):
    tf = pytest.importorskip('transformers')
    cls,chosen = getattr(tf, name),[]
    model = cls(cls.config_class(**models[name]))
    for p in model.parameters():
        if p.dim()>1: nn.init.normal_(p, std=.5)
    # a router's output is a tuple; its last element has the indices of the chosen experts
    for path,m in model.named_modules():
        if path.endswith(('.gate', '.router')): m.register_forward_hook(lambda m, inputs, out: chosen.append(count(out[-1], m.num_experts)))
    te = torchEmber(model.train(), ttypes='output', include=name, routers=True)
    out = model(input_ids=torch.randint(3, 60, (3, 20)))
    te.close()
    k,n = models[name]['num_experts_per_tok'],len(chosen[0])
    assert counts_of(te)==chosen and len(chosen)==2 and sum(chosen[0])==60*k
    if models[name].get('output_router_logits'): assert counts_of(te)==[count(logits.topk(k).indices, n) for logits in out.router_logits]
    whole = routers(te).query('tname=="router"')
    share = torch.tensor(chosen).double()/(60*k)
    entropy = -(share*share.clamp_min(1e-300).log()).sum(1)/torch.tensor(float(n)).log().double()
    torch.testing.assert_close(torch.tensor(whole.entropy.to_numpy(float)), entropy, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.tensor(whole.top_share.to_numpy(float)), share.topk(k).values.sum(1), rtol=1e-6, atol=1e-6)
    assert whole[['experts', 'choices', 'tokens']].drop_duplicates().astype(int).values.tolist()==[[n, k, 60]]


def test_dropped_tokens_of_switch_transformers():
    tf = pytest.importorskip('transformers')
    model = tf.SwitchTransformersForConditionalGeneration(tf.SwitchTransformersConfig(vocab_size=60, d_model=16, d_kv=4, d_ff=24, num_layers=1,
        num_heads=4, num_experts=4, expert_capacity=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=0, dropout_rate=0.,
        router_jitter_noise=0.)).train()
    masks = []
    nn.init.normal_(model.encoder.block[0].layer[1].mlp.router.classifier.weight)
    model.encoder.block[0].layer[1].mlp.router.register_forward_hook(lambda m, inputs, out: masks.append(out[0]))
    te = torchEmber(model, routers=True)
    model(input_ids=torch.randint(3, 60, (3, 20)), decoder_input_ids=torch.ones(3, 2, dtype=torch.long))
    te.close()
    row = routers(te).iloc[0]
    assert row.dropped==pytest.approx(1-masks[0].sum().item()/60, abs=1e-6) and row.dropped>.2 and row.choices==1


class Mixture(nn.Module):
    "A mixture of four experts with stacked weights. `how`: the way in which the router chooses experts."
    def __init__(self, how='torch', size=8):
        super().__init__()
        self.how,self.gate,self.chosen = how,nn.Linear(size, 4),[]
        self.up = nn.Parameter(torch.randn(4, size, size)*.3)

    def choose(self, scores):
        ways = {'torch': lambda: torch.topk(scores, 2, dim=-1)[1], 'method': lambda: scores.topk(2).indices,
            'argmax': lambda: scores.argmax(-1, keepdim=True),
            'twice': lambda: torch.stack([(a := torch.argmax(scores, dim=-1)), scores.scatter(-1, a[..., None], -torch.inf).argmax(dim=2)], -1)}
        return ways[self.how]()

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        chosen = self.choose(scores)
        self.chosen.append(count(chosen, 4))
        own = torch.einsum('bsd,edh->bseh', x, self.up)
        return x+(own*torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))[..., None]).sum(2)


ways = 'torch','method','argmax','twice'


def hand_written(how=ways): return nn.Sequential(*map(Mixture, how))


def test_hand_written_routers():
    model = hand_written()
    te = torchEmber(model, ttypes='weight', include='3', routers=True)
    model(torch.randn(3, 12, 8))
    te.disarm()
    assert counts_of(te)==[m.chosen[0] for m in model]
    whole = routers(te).query('tname=="router"')
    # experts are no modules here, so the number of dropped tokens is unknown
    assert list(whole.path)==list('0123') and list(whole.choices)==[2, 2, 1, 2] and 'dropped' not in whole
    assert set(whole.dtype)=={'float32'} and set(whole.tokens)=={36}


def test_training_is_the_same_to_the_bit():
    topk = torch.topk
    alone,recorded = train(hand_written())[0],train(hand_written(), routers=1)
    assert all(map(torch.equal, alone, recorded[0]))
    assert len(routers(recorded[1]))==3*5*len(ways) and torch.topk is topk and 'topk' not in vars(torch.Tensor)


@pytest.mark.parametrize('reentrant', [True, False])
def test_recomputed_choices_have_no_second_rows(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = hand_written(['torch', 'method'])
        def forward(self, x):
            for layer in self.layers: x = checkpoint(layer, x, use_reentrant=reentrant)
            return x
    model = Checkpointed()
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), routers=1)
    model(torch.randn(3, 12, 8, requires_grad=True)).mean().backward()
    te.close()
    assert len(routers(te))==10 and set(routers(te).call)=={0}


def test_steps_calls_and_failed_passes():
    class Twice(nn.Module):
        fails = True
        def __init__(self):
            super().__init__()
            self.layer = Mixture()
        def forward(self, x):
            x = self.layer(self.layer(x)) # the layer is called twice; the second call has its own rows
            if self.fails: raise ValueError('no memory')
            return x
    model = Twice()
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, opt, routers=2)
    with pytest.raises(ValueError): model(torch.randn(2, 4, 8))
    model.fails,model.layer.chosen = False,[]
    for _ in range(3):
        for _ in range(2): model(torch.randn(2, 4, 8)).mean().backward()
        opt.step()
        with torch.no_grad(): model.eval()(torch.randn(2, 4, 8))
        model.train()
    te.close()
    rows = routers(te)
    assert counts_of(te)==[model.layer.chosen[i] for i in (0, 1, 12, 13)] and list(rows.step.unique())==[0, 2] and set(rows.micro)=={0}


def test_what_is_no_router():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.head,self.layers,self.num_experts = nn.Linear(8, 10),nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),5
        def forward(self, x):
            for layer in self.layers: x = layer(x)
            out = self.head(x)
            out.topk(5); out.argmax(-1); torch.topk(out, 2, dim=0); out.argmax(); x[0].topk(2); x.topk(3); out[..., :5].topk(2)
            return out
    model = Other()
    with pytest.warns(EmberWarning, match='No router was found in model') as found:
        te = torchEmber(model, routers=1)
        for _ in range(3): model(torch.randn(4, 8))
        te.close()
    assert len(found)==1 and not len(routers(te))


def test_a_statistic_of_the_user_is_no_router():
    model = Mixture()
    te = torchEmber(model, ttypes='output', routers=1)
    @te.how_record_out
    def best(x): return {'best': x.flatten(0, -2)[:, :4].topk(1).indices.float().mean()}
    model(torch.randn(3, 12, 8))
    te.close()
    assert counts_of(te)==model.chosen and set(routers(te).query('tname=="router"').choices)=={2}


@pytest.mark.parametrize('exclude', [None, 'experts.3'])
def test_dropped_tokens_need_all_experts(exclude):
    class Half(nn.Module):
        "A mixture of experts in which each expert drops the second half of its tokens."
        def __init__(self):
            super().__init__()
            self.gate,self.experts = nn.Linear(8, 4),nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        def forward(self, x):
            self.chosen = self.gate(x).topk(1).indices[:, 0]
            for i,expert in enumerate(self.experts): expert(x[self.chosen==i][:int((self.chosen==i).sum())//2])
            return x
    model = Half()
    te = torchEmber(model, ttypes='output', routers=1, exclude=exclude)
    model(torch.randn(64, 8))
    te.close()
    kept = sum(n//2 for n in count(model.chosen, 4))
    row = routers(te).iloc[0]
    assert row.get('dropped')==pytest.approx(1-kept/64, abs=1e-6) if exclude is None else 'dropped' not in row


def test_a_failing_count_does_not_stop_the_training(monkeypatch):
    from torchember.recorder import routers as module
    def fails(*args): raise RuntimeError('no count')
    monkeypatch.setattr(module, 'count_choices', fails)
    model = Mixture()
    te = torchEmber(model, routers=True)
    with pytest.warns(EmberWarning, match='no count'): model(torch.randn(3, 12, 8))
    te.close()
    assert not len(routers(te))


@pytest.mark.release # slow: the model is compiled twice
def test_compiled_code_is_unchanged_and_named():
    def run(**more):
        model = hand_written(['torch', 'argmax'])
        model[0].choose,model[1].choose = (lambda scores: torch.topk(scores, 2)[1]),(lambda scores: scores.argmax(-1, keepdim=True))
        for m in model: m.chosen = type('', (), {'append': lambda self, x: None})()
        torch._dynamo.reset()
        return train(model, run=torch.compile(model, backend='aot_eager'), **more)
    with pytest.warns(EmberWarning, match='No router'): recorded,te = run(routers=1)
    assert all(map(torch.equal, run()[0], recorded)) and not len(routers(te))


def test_by_tensor_type_and_rules():
    model = Mixture('method')
    with torch.no_grad(): model.gate.bias[1:] = torch.tensor([-9., -9., 9.])
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    te = torchEmber(model, opt, ttypes=['output', 'router'])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for _ in range(6):
            model(torch.randn(4, 16, 8)).square().mean().backward()
            opt.step()
        te.close()
    assert [r for r in diagnose(te)['rule'] if 'router' in r or 'expert' in r]==['router_collapse', 'unused_expert']
