"Statistics of attention heads are compared with explicit weights: Hugging Face and torch models, hand-written attention, checkpoints, bad input."
import warnings

import pytest
import torch
from same_training import train
from torch import nn
from torch import softmax as imported_softmax
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchember import EmberWarning, diagnose, torchEmber


def heads(te):
    "Return the rows about attention as a DataFrame."
    df = te.t.df
    return df[df.ttype=='attention'].reset_index(drop=True)


def expected(w):
    "Return the expected statistics of each head. `w`: attention weights (sequences, heads, queries, keys), 0 for masked keys."
    w = w.double()
    count = (w>0).sum(-1)
    chosen = count>1
    entropy = -(w*w.clamp_min(1e-300).log()).sum(-1)
    def mean(v, chosen=chosen): return (v*chosen).sum((0, 2))/chosen.sum((0, 2))
    out = dict(entropy=mean(entropy/count.clamp_min(2).log()), effective_length=mean(entropy.exp()),
        first_token=mean(w[..., 0], chosen & (w[..., 0]>0)), top_share=((w*chosen[..., None]).sum(2)/chosen.sum(2)[..., None].clamp_min(1)).amax(-1).mean(0))
    return out | ({'future': mean(w.triu(1).sum(-1))} if w.shape[-1]==w.shape[-2] else {})


def compare(rows, weights, tolerance=1e-5):
    "Check the rows against the attention weights of each call, in the order of the calls."
    calls = list(dict.fromkeys(zip(rows.module, rows.call, strict=True)))
    assert len(calls)==len(weights)
    for (module,call),w in zip(calls, weights, strict=True):
        own = rows[(rows.module==module) & (rows.call==call)]
        assert list(own.tname)==[f'head_{i}' for i in range(w.shape[1])]
        assert set(own['queries'])=={w.shape[2]} and set(own['keys'])=={w.shape[3]}
        for column,want in expected(w).items():
            torch.testing.assert_close(torch.tensor(own[column].to_numpy(float)), want, rtol=tolerance, atol=tolerance, msg=f'{module} {column}')


sizes = dict(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, max_position_embeddings=64)
undropped = dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
grouped = dict(sizes, num_key_value_heads=2)
models = {
    'GPT2LMHeadModel': dict(vocab_size=60, n_embd=16, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0., resid_pdrop=0., embd_pdrop=0.,
        bos_token_id=1, eos_token_id=1),
    'BertForMaskedLM': sizes | undropped, 'LlamaForCausalLM': grouped, 'MixtralForCausalLM': dict(grouped, num_local_experts=4, sliding_window=7),
    'Gemma2ForCausalLM': dict(grouped, head_dim=8, sliding_window=6, attn_logit_softcapping=5.),
    'T5ForConditionalGeneration': dict(vocab_size=60, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.),
    'ViTForImageClassification': dict(image_size=28, patch_size=7, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=24) | undropped,
    'BloomForCausalLM': dict(vocab_size=60, hidden_size=16, n_layer=2, n_head=4), 'FalconForCausalLM': dict(vocab_size=60, hidden_size=16,
        num_hidden_layers=2, num_attention_heads=4, alibi=False),
    'OPTForCausalLM': dict(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, ffn_dim=24, dropout=0.,
        word_embed_proj_dim=16),
    'Qwen2ForCausalLM': grouped, 'MistralForCausalLM': dict(grouped, sliding_window=5), 'GPTNeoXForCausalLM': sizes,
    'DistilBertForMaskedLM': dict(vocab_size=60, dim=16, n_layers=2, n_heads=4, hidden_dim=24, max_position_embeddings=64, dropout=0., attention_dropout=0.),
    'BartForConditionalGeneration': dict(vocab_size=60, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64, dropout=0.)}
with_encoder = 'T5ForConditionalGeneration', 'BartForConditionalGeneration'
without_sdpa = 'Gemma2ForCausalLM', 'BloomForCausalLM'


@pytest.mark.parametrize('implementation', ['eager', 'sdpa'])
@pytest.mark.parametrize('name', models)
def test_numbers_equal_those_of_explicit_weights(name, implementation):
    if implementation=='sdpa' and name in without_sdpa: pytest.skip('this model has only eager attention')
    tf = pytest.importorskip('transformers')
    cls = getattr(tf, name)
    make = lambda how: cls._from_config(cls.config_class(**models[name]), attn_implementation=how)
    model,explicit = make(implementation),make('eager')
    for p in model.parameters():
        if p.dim()>1: nn.init.normal_(p, std=.5)
    explicit.load_state_dict(model.state_dict())
    ids = torch.randint(3, 60, (3, 20))
    padding = torch.ones_like(ids)
    padding[1, -3:] = 0
    inputs = dict(pixel_values=torch.randn(3, 3, 28, 28)) if 'ViT' in name else dict(input_ids=ids, attention_mask=padding)
    if name in with_encoder: inputs |= dict(decoder_input_ids=ids[:, :10])
    te = torchEmber(model.train(), ttypes='output', include=name, attention=True)
    model(**inputs)
    te.disarm()
    with torch.no_grad(): o = explicit(**inputs, output_attentions=True)
    weights = o.attentions if name not in with_encoder else \
        [*o.encoder_attentions, *(w for pair in zip(o.decoder_attentions, o.cross_attentions, strict=True) for w in pair)]
    rows = heads(te)
    compare(rows, weights)
    causal = {'BertForMaskedLM': False, 'ViTForImageClassification': False, 'DistilBertForMaskedLM': False,
        **dict.fromkeys(with_encoder)}.get(name, True)
    if causal is not None: assert ((rows.reach==0)==causal).all()
    # with T5, logits may exceed the bound because T5 adds a bias
    if implementation=='sdpa' and 'T5' not in name: assert (rows.logit_max<=rows.logit_bound*1.0001).all()


# models whose projection to queries, keys and values is known, and a function that returns the values (sequences, tokens, heads, size) from its output
projections = {'GPT2LMHeadModel': ('c_attn', lambda x: x.chunk(3, -1)[2].unflatten(-1, (4, 4))),
    'LlamaForCausalLM': ('v_proj', lambda x: x.unflatten(-1, (2, 4)).repeat_interleave(2, 2))}


@pytest.mark.parametrize('name', projections)
def test_size_of_the_values_equals_explicit_arithmetic(name):
    "The sample has the sequences 0, 3, 6, ... of 20 sequences. In Llama, two heads share the values of a group."
    tf = pytest.importorskip('transformers')
    cls,(projection,values_of) = getattr(tf, name),projections[name]
    config = cls.config_class(**models[name])
    model = cls._from_config(config, attn_implementation='sdpa')
    values = []
    for n,m in model.named_modules():
        if n.endswith(projection): m.register_forward_hook(lambda m, args, out: values.append(values_of(out.detach())))
    te = torchEmber(model.train(), attention=True)
    model(input_ids=torch.randint(3, 60, (20, 12)))
    te.disarm()
    rows = heads(te)
    expected = [v[::3].double().square().mean((0, 1, 3)).sqrt() for v in values]
    assert len(expected)==2 and list(rows.tname)==[f'head_{i}' for _ in range(2) for i in range(4)]
    torch.testing.assert_close(torch.tensor(rows.value_rms.to_numpy(float)), torch.cat(expected), rtol=1e-6, atol=0)
    assert rows.value_rms.nunique()==(4 if 'Llama' in name else 8)


def test_size_of_the_values_is_unknown_if_only_the_softmax_is_seen():
    model = hand_written(['method', 'sdpa', 'F'])
    te = torchEmber(model, attention=True)
    model(torch.randn(3, 12, 8))
    te.disarm()
    assert heads(te).value_rms.notna().tolist()==[False]*2+[True]*2+[False]*2


class Attention(nn.Module):
    "Causal attention with two heads. `how`: the way the attention is computed. The attention weights are kept in `weights`."
    def __init__(self, how, size=8):
        super().__init__()
        self.how,self.qkv,self.out = how,nn.Linear(size, 3*size),nn.Linear(size, size)

    def forward(self, x):
        q,k,v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        logits = q@k.mT*q.shape[-1]**-.5+torch.full((x.shape[1],)*2, -torch.inf).triu(1)
        ways = {'sdpa': lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 'method': lambda: logits.softmax(-1)@v,
            'torch': lambda: torch.softmax(logits, -1)@v, 'imported': lambda: imported_softmax(logits, dim=3)@v,
            'F': lambda: F.softmax(logits, dim=-1)@v, 'mask': lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=logits[0, 0]>-torch.inf)}
        self.weights = torch.exp(logits.detach()-logits.detach().logsumexp(-1, keepdim=True))
        return x+self.out(ways[self.how]().transpose(1, 2).flatten(2))


spellings = 'sdpa', 'method', 'torch', 'imported', 'F', 'mask'


def hand_written(how=spellings): return nn.Sequential(*map(Attention, how))


def test_hand_written_attention():
    model = hand_written()
    te = torchEmber(model, attention=True)
    model(torch.randn(3, 12, 8))
    te.disarm()
    rows = heads(te)
    compare(rows, [m.weights for m in model])
    assert list(rows.module[::2])==[f'model(Sequential).{i}(Attention)' for i in range(len(model))]
    assert set(rows.reach)=={0} and set(rows['keys'])==set(rows['queries'])=={12} and rows.dtype.eq('float32').all()


def einsum_in_float32(q, k, hidden):
    "Compute the logits with einsum, and the softmax in float64. Return the function to call, and the logits."
    logits = torch.einsum('bqhd,bkhd->bhqk', q.transpose(1, 2).half().float(), k.transpose(1, 2))+hidden
    return lambda: F.softmax(logits, -1, dtype=torch.float64), logits


def one_head(q, k, hidden): # logits with three dimensions; the module has no attribute for the number of heads
    logits = q[:, 0]@k[:, 0].mT+hidden
    return lambda: torch.softmax(logits, 2), logits[:, None]


def groups_of_heads(q, k, hidden): # grouped-query attention; the logits have five dimensions
    logits = (q.unflatten(1, (2, 2))@k[:, ::2, None].mT)+hidden
    return lambda: nn.Softmax(dim=-1)(logits), logits.flatten(1, 2)


def bias_by_distance(q, k, hidden): # ALiBi: a bias that grows with the distance of tokens, passed to SDPA as its mask
    n = q.shape[2]
    bias = hidden-torch.tensor([.5, .25, .1, .05])[:, None, None]*(torch.arange(n)[:, None]-torch.arange(n)).abs()
    return lambda: F.scaled_dot_product_attention(q, k, k, attn_mask=bias), q@k.mT*q.shape[-1]**-.5+bias


@pytest.mark.parametrize('way', [einsum_in_float32, one_head, groups_of_heads, bias_by_distance])
def test_other_hand_written_attention(way):
    class Other(nn.Module):
        n_heads = None if way is one_head else 4
        def forward(self, q, k): return run()
    q,k = torch.randn(2, 4, 10, 8),torch.randn(2, 4, 10, 8)
    run,logits = way(q, k, torch.full((10, 10), -torch.inf).triu(1))
    te = torchEmber(model := Other(), ttypes='output', attention=True)
    model(q, k)
    te.disarm()
    compare(heads(te), [logits.softmax(-1)])


@pytest.mark.parametrize('need_weights', [True, False])
def test_multihead_attention(need_weights):
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x,y = torch.randn(3, 6, 8),torch.randn(3, 9, 8)
    hidden = torch.zeros(3, 9, dtype=torch.bool)
    hidden[2, 5:] = True
    te = torchEmber(model, attention=True)
    model(x, y, y, key_padding_mask=hidden, need_weights=need_weights)
    te.disarm()
    weights = model(x, y, y, key_padding_mask=hidden, average_attn_weights=False)[1].detach()
    compare(heads(te), [weights])
    assert 'reach' not in heads(te) # 6 queries and 9 keys: `reach` is measured only if both numbers are equal


def test_encoder_layers():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    te = torchEmber(model, attention=True)
    model(torch.randn(3, 6, 8))
    te.disarm()
    rows = heads(te)
    of_layer = 'model(TransformerEncoder).layers(ModuleList).{}(TransformerEncoderLayer).self_attn(MultiheadAttention)'
    assert list(rows.module.unique())==[of_layer.format(i) for i in range(2)]
    assert len(rows)==4 and (rows.reach==5).all()


def test_training_is_the_same_to_the_bit():
    alone,recorded = train(hand_written())[0],train(hand_written(), attention=1)
    assert all(map(torch.equal, alone, recorded[0]))
    assert len(heads(recorded[1]))==3*2*len(spellings)


@pytest.mark.parametrize('reentrant', [True, False])
def test_recomputed_attention_has_no_second_rows(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = hand_written(['sdpa', 'method'])
        def forward(self, x):
            for layer in self.layers: x = checkpoint(layer, x, use_reentrant=reentrant)
            return x
    model = Checkpointed()
    inputs = torch.randn(3, 12, 8, requires_grad=True)
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), attention=1)
    model(inputs).mean().backward()
    te.close()
    assert len(heads(te))==4 and set(heads(te).call)=={0}


def test_steps_micro_batches_and_evaluations():
    model = hand_written(['sdpa'])
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, opt, attention=2, every=1)
    for _ in range(5):
        for _ in range(2): model(torch.randn(2, 4, 8)).mean().backward()
        opt.step()
        with torch.no_grad(): model.eval()(torch.randn(2, 4, 8))
        model.train()
    te.close()
    rows = heads(te)
    assert list(rows.step)==[0, 0, 2, 2, 4, 4] and set(rows.micro)=={0}


def test_a_failed_pass_is_repeated():
    class Fails(nn.Module):
        fails = True
        def forward(self, x):
            if self.fails: raise ValueError('no memory')
            return x
    model = nn.Sequential(Attention('sdpa'), Fails())
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), attention=True)
    with pytest.raises(ValueError): model(torch.randn(2, 4, 8))
    model[1].fails = False
    model(torch.randn(2, 4, 8)).mean().backward()
    te.disarm()
    assert list(heads(te).tname)==['head_0', 'head_1']


def test_watch_attention_of_an_ember():
    model,sdpa = hand_written(['sdpa']),F.scaled_dot_product_attention
    te = torchEmber(model)
    assert F.scaled_dot_product_attention is sdpa
    x = torch.randn(2, 4, 8)
    model(x)
    te.watch_attention()
    model(x)
    te.watch_attention(False)
    assert F.scaled_dot_product_attention is sdpa
    model(x)
    te.close()
    assert set(heads(te).step)=={1}


def test_without_attention_a_note_is_given_once():
    model = nn.Linear(2, 1)
    with pytest.warns(EmberWarning, match='No attention was found in model') as found:
        te = torchEmber(model, attention=1)
        for _ in range(3): model(torch.randn(4, 2))
        te.close()
    assert len(found)==1
    df = te.t.df
    assert list(df[df.ttype=='finding'].severity)==['info']


def compiled_and_eager(backend, make, parts=False, **more):
    "Train a compiled model without and with recorded attention, and an eager model. Return the attention rows, compiled and eager."
    def run(compiled=True, **more):
        model = make()
        torch._dynamo.reset()
        if parts: model[0].compile(backend=backend)
        f = torch.compile(model, backend=backend, fullgraph=True) if compiled and not parts else model
        return train(model, run=lambda x: f(x), **more)
    alone,(recorded,te) = run()[0],run(attention=1, **more)
    assert all(map(torch.equal, alone, recorded))
    return heads(te), heads(run(False, attention=1, **more)[1])


def several(): return nn.Sequential(*map(Attention, ('method', 'imported', 'mask')), nn.TransformerEncoderLayer(8, 2, 8, dropout=0.))


@pytest.mark.slow
@pytest.mark.parametrize('parts', [False, True])
@pytest.mark.parametrize('backend', ['aot_eager', 'inductor'])
def test_compiled_code_has_the_same_rows_and_bits(backend, parts):
    with warnings.catch_warnings():
        warnings.simplefilter('error', EmberWarning)
        compiled,eager = compiled_and_eager(backend, several, parts)
    assert len(compiled)==3*(3*2+2)
    same = ['step', 'module', 'tname', 'call', 'dtype', 'queries', 'keys', 'reach']
    assert compiled[same].equals(eager[same])
    for c in ('logit_max', 'logit_bound', 'entropy', 'effective_length', 'first_token', 'top_share', 'future', 'value_rms'):
        got,want = (torch.tensor(rows[c].to_numpy(float)) for rows in (compiled, eager))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True, msg=c)


@pytest.mark.release # this test is slow
def test_attention_of_compiled_code_can_be_switched_on_and_off():
    model = nn.Sequential(Attention('method'))
    f = torch.compile(model, backend='aot_eager', fullgraph=True)
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), every=2)
    def step():
        f(torch.randn(2, 4, 8)).mean().backward()
        te.recorder.watch.optimizers[0].step()
    step(), step()
    te.watch_attention(1)
    for _ in range(4): step()
    te.watch_attention(False)
    step(), step()
    te.close()
    assert list(heads(te).step)==[2]*2+[4]*2


def test_scripting_while_attention_is_recorded():
    te = torchEmber(nn.Linear(1, 1), ttypes='weight', attention=True)
    for module in (nn.MultiheadAttention(8, 2), nn.Softmax(-1), nn.Sequential(nn.Softmax(1))): torch.jit.script(module)
    te.disarm()


def test_odd_inputs():
    class Odd(nn.Module):
        num_heads = 2
        def forward(self, x):
            one = F.scaled_dot_product_attention(x[:, :, :1], x[:, :, :1], x[:, :, :1]) # attention with only one key
            hidden = torch.zeros(4, 4, dtype=torch.bool)
            F.scaled_dot_product_attention(x, x, x, attn_mask=hidden)
            F.scaled_dot_product_attention(x[:0], x[:0], x[:0]) # attention of an empty batch
            F.scaled_dot_product_attention(x[:, :0], x[:, :0], x[:, :0]) # attention without heads
            F.scaled_dot_product_attention(x[0, 0], x[0, 0], x[0, 0]) # attention without batch and head dimensions
            F.scaled_dot_product_attention(x.flatten(0, 1), x.flatten(0, 1), x.flatten(0, 1), attn_mask=hidden[:1].logical_not())
            F.softmax(x*torch.nan, -1)
            x.softmax(dim=1) # a softmax over another dimension than the keys
            x[0, 0].softmax(-1) # a softmax over class scores, not over keys
            return one
    model = Odd()
    te = torchEmber(model, attention=True)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model(torch.randn(3, 2, 4, 4))
        F.scaled_dot_product_attention(*[torch.randn(1, 1, 2, 2)]*3) # called outside of the model's forward pass
        te.disarm()
    rows = heads(te)
    assert [len(rows[rows.call==i]) for i in range(6)]==[2, 2, 1, 2, 2, 0]
    single,hidden,nan = (rows[rows.call==i] for i in (0, 1, 4))
    assert single.entropy.isna().all() and single.logit_max.notna().all() and (single['keys']==1).all()
    assert hidden.logit_max.isna().all() and hidden.logit_bound.notna().all()
    assert (nan.nonfinite if 'nonfinite' in nan else nan.entropy.isna()).all()


def test_nested_sequences_are_named():
    class Nested(nn.Module):
        def forward(self, x): return F.scaled_dot_product_attention(x, x, x)
    model = Nested()
    x = torch.nested.nested_tensor([torch.randn(3, 2, 4), torch.randn(5, 2, 4)], layout=torch.jagged).transpose(1, 2)
    te = torchEmber(model, ttypes='weight', attention=True)
    with pytest.warns(EmberWarning, match='nested'): model(x)
    te.disarm()
    assert not len(heads(te))


class FlexAttention(nn.Module):
    "Attention that torchember cannot see."
    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention
        # on a CPU, flex_attention has no backward
        with torch.no_grad(): y = flex_attention(*[x.detach()[:, None]]*3)[:, 0]
        return x+y


class SkipsOne(nn.Module):
    "A model that never calls the layer `unused`."
    def __init__(self):
        super().__init__()
        self.seen,self.flex,self.unused = nn.TransformerEncoderLayer(16, 2, 32, 0., batch_first=True),FlexAttention(),FlexAttention()

    def forward(self, x): return self.flex(self.seen(x))


def said_about(model, **kwargs):
    "Record three passes of a model. Return the ember and the warnings about attention."
    te = torchEmber(model, attention=True, **kwargs)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        for _ in range(3): model(torch.randn(2, 16, 16, requires_grad=True)).mean().backward()
    te.close()
    return te,[str(w.message) for w in seen if 'No attention' in str(w.message)]


def encoder(): return nn.TransformerEncoderLayer(16, 2, 32, 0., batch_first=True)


def test_a_layer_whose_attention_cannot_be_seen_is_named():
    "The warning names both layers, once."
    te,said = said_about(nn.Sequential(encoder(), FlexAttention(), FlexAttention()))
    assert len(said)==1 and 'model(Sequential).1(FlexAttention), model(Sequential).2(FlexAttention), although' in said[0] and 'flex_attention' in said[0]
    assert set(heads(te).path)=={'0.self_attn'}


def test_many_layers_whose_attention_cannot_be_seen_are_counted():
    _,(said,) = said_about(nn.Sequential(encoder(), *[FlexAttention() for _ in range(5)]))
    assert 'model(Sequential).3(FlexAttention) and 2 more modules, although' in said


def test_only_recorded_layers_that_were_called_are_named():
    _,(said,) = said_about(SkipsOne())
    assert 'model(SkipsOne).flex(FlexAttention), although' in said and 'unused' not in said
    assert said_about(nn.Sequential(encoder(), FlexAttention()), exclude='1')[1]==[]


def test_a_model_without_visible_attention_has_one_warning():
    _,said = said_about(nn.Sequential(nn.Linear(16, 16), FlexAttention()))
    assert len(said)==1 and 'so the run has no rows' in said[0]


@pytest.mark.parametrize('how', ['sdpa', 'method', 'mask'])
def test_a_model_in_float64_has_the_numbers_of_explicit_weights(how):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(how)).double()
    with torch.no_grad(): model[0].qkv.weight *= 4
    te = torchEmber(model, attention=True)
    with warnings.catch_warnings():
        warnings.simplefilter('error', EmberWarning)
        model(torch.randn(3, 80, 8, dtype=torch.float64)) # 80 positions: some queries are chosen by their norm
    te.disarm()
    rows,w = heads(te),model[0].weights
    assert list(rows.tname)==['head_0', 'head_1'] and (rows['dtype']=='float64').all() and (rows.reach==0).all()
    entropy = expected(w)['entropy']
    torch.testing.assert_close(torch.tensor(rows.entropy.to_numpy(float)), entropy, rtol=.1, atol=0) # means of a sample


def test_a_short_sequence_in_float64_has_the_exact_numbers():
    torch.manual_seed(0)
    model = hand_written(['sdpa', 'method']).double()
    te = torchEmber(model, attention=True)
    model(torch.randn(3, 12, 8, dtype=torch.float64))
    te.disarm()
    compare(heads(te), [m.weights for m in model])


@pytest.mark.parametrize('implementation', ['eager', 'sdpa'])
def test_queries_of_padding_that_see_no_key_are_left_out(implementation):
    "With padding on the left, all keys of the first queries have the mask value `finfo.min`, so their explicit weights are equal."
    tf = pytest.importorskip('transformers')
    config = tf.LlamaConfig(**models['LlamaForCausalLM'])
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM._from_config(config, attn_implementation=implementation)
    explicit = tf.LlamaForCausalLM._from_config(config, attn_implementation='eager')
    explicit.load_state_dict(model.state_dict())
    ids,padding = torch.randint(3, 60, (3, 20)),torch.ones(3, 20, dtype=torch.long)
    padding[1, :4] = 0
    opt = torch.optim.SGD(model.train().parameters(), 0.)
    te = torchEmber(model, opt, attention=True)
    for _ in range(5):
        model(input_ids=ids, attention_mask=padding, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()
    te.close()
    with torch.no_grad(): weights = explicit(input_ids=ids, attention_mask=padding, output_attentions=True).attentions
    for w in weights: w[1, :, :4] = 0
    rows = heads(te)
    compare(rows[rows.step==0], weights)
    assert rows.logit_max.abs().max()<100
    assert not set(diagnose(te).rule) & {'dead_heads', 'future_attention'}


class Masked(nn.Module):
    "Attention with two heads and a residual connection. The mask hides all keys if `value` is a number: the logits of hidden keys."
    num_heads = 2
    def __init__(self, how, value=None, size=8):
        super().__init__()
        self.how,self.value,self.qkv = how,value,nn.Linear(size, 3*size)

    def forward(self, x):
        q,k,v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        n = x.shape[1]
        mask = torch.zeros(n, n) if self.value is None else torch.full((n, n), self.value)
        y = F.scaled_dot_product_attention(q, k, v, mask) if self.how=='sdpa' else ((q@k.mT*.5+mask).softmax(-1))@v
        return x+y.transpose(1, 2).flatten(2)


hidden = 'value', [-1e9, torch.finfo(torch.float32).min]


def findings_about_dead_heads(*layers):
    "Train the layers for a few steps. Return path and severity of each finding of `dead_heads`, and the rows."
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), .01)
    te = torchEmber(model, opt, attention=True)
    for _ in range(6):
        loss = model(torch.randn(3, 12, 8)).square().mean()
        te.log(loss=loss)
        loss.backward()
        opt.step()
        opt.zero_grad()
    te.close()
    found = diagnose(te)
    return [(f.path, f.severity) for f in found.itertuples() if f.rule=='dead_heads'], heads(te)


@pytest.mark.parametrize('how', ['sdpa', 'softmax'])
@pytest.mark.parametrize(*hidden)
def test_a_finite_mask_value_that_hides_all_keys_is_found(how, value):
    found,rows = findings_about_dead_heads(Masked(how), Masked(how, value))
    assert found==[('1', 'error')]
    blind,sees = rows[rows.path=='1'],rows[rows.path=='0']
    for column in ('logit_max', 'entropy', 'effective_length', 'first_token', 'top_share', 'future'):
        assert blind[column].isna().all() and sees[column].notna().all(), column
    assert (blind.reach==0).all() and (sees.reach==11).all()


@pytest.mark.parametrize('how', ['sdpa', 'softmax'])
@pytest.mark.parametrize(*hidden)
def test_a_mask_that_hides_all_keys_in_all_layers_is_found(how, value):
    found,rows = findings_about_dead_heads(Masked(how, value), Masked(how, value))
    assert found==[('0', 'error')] and len(rows)>=2*2*4
    assert 'logit_max' not in rows or rows.logit_max.isna().all()
    assert findings_about_dead_heads(Masked(how), Masked(how))[0]==[]


def layout(equation, of_heads):
    "Return hand-written attention, as a function of queries, keys and values (sequences, positions, heads, size). The logits follow `equation`."
    def attend(q, k, v):
        w = (torch.einsum(equation, q, k)/q.shape[-1]**.5).softmax(-1)
        return torch.einsum(of_heads, w, v), w
    return attend


def explicit_softmax(x):
    "Compute a softmax without the function of torch, which torchember replaces."
    e = (x-x.amax(-1, keepdim=True)).exp()
    return e/e.sum(-1, keepdim=True)


def by_sdpa(q, k, v):
    "Attend by `scaled_dot_product_attention`, with the heads in the first dimension."
    q,k,v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).permute(1, 2, 0, 3), explicit_softmax(q @ k.mT/q.shape[-1]**.5)


layouts = { # name -> function that attends, and order of dimensions that brings its weights to (sequences, heads, queries, keys)
    'bhqk': (layout('bqhd,bkhd->bhqk', 'bhqk,bkhd->bqhd'), (0, 1, 2, 3)), 'hbqk': (layout('bqhd,bkhd->hbqk', 'hbqk,bkhd->bqhd'), (1, 0, 2, 3)),
    'bqhk': (layout('bqhd,bkhd->bqhk', 'bqhk,bkhd->bqhd'), (0, 2, 1, 3)), 'sdpa': (by_sdpa, (1, 0, 2, 3))}


class Laid(nn.Module):
    "Attention with 4 heads, whose logits have an unusual order of dimensions."
    def __init__(self, attend):
        super().__init__()
        self.attend,self.num_heads,self.qkv = attend,4,nn.Linear(16, 48)

    def forward(self, x):
        q,k,v = (t.unflatten(-1, (4, 4)) for t in self.qkv(x).chunk(3, -1))
        out,self.weights = self.attend(q, k, v)
        return out.flatten(2)


@pytest.mark.parametrize('sequences', [3, 7])
@pytest.mark.parametrize('name', layouts)
def test_heads_on_another_dimension_are_found(name, sequences):
    torch.manual_seed(0)
    attend,order = layouts[name]
    model = nn.Sequential(Laid(attend))
    te = torchEmber(model, attention=True)
    model(torch.randn(sequences, 9, 16)*3)
    te.close()
    rows = heads(te)
    compare(rows, [model[0].weights.detach().permute(order)])
    assert set(rows['queries'])==set(rows['keys'])=={9}


def five_dimensions(q, k, v):
    "Attend by groups of 2 heads: the logits have five dimensions, and no dimension or pair of dimensions has 4 heads."
    w = torch.einsum('bqgd,bkgd->bgqk', q, k)[:, :, None].expand(-1, -1, 3, -1, -1).softmax(-1)
    return torch.einsum('bgqk,bkgd->bqgd', w[:, :, 0], v), w


def windows(q, k, v):
    "Attend to the last 3 positions, as Longformer does. The keys of the logits (sequences, queries, heads, keys) are not positions."
    near = torch.stack([k.roll(n, 1) for n in range(3)], 3)
    w = torch.einsum('bqhd,bqhkd->bqhk', q, near).softmax(-1)
    return torch.einsum('bqhk,bqhkd->bqhd', w, torch.stack([v.roll(n, 1) for n in range(3)], 3)), w


@pytest.mark.parametrize('attend', [five_dimensions, windows])
def test_logits_whose_heads_are_unknown_have_no_rows_and_one_warning(attend):
    model = nn.Sequential(Laid(attend), Laid(attend))
    with pytest.warns(EmberWarning, match='is not measured: it is unknown which dimension of logits of shape .* The module has 4 heads') as given:
        te = torchEmber(model, attention=True)
        for _ in range(2): model(torch.randn(3, 9, 16))
    te.close()
    assert len(given)==1
    assert not len(heads(te))
    found = diagnose(te)
    assert (found['severity']=='info')[found['text'].str.contains('The module has 4 heads')].tolist()==[True]


def test_heads_of_five_dimensions_need_the_number_of_heads():
    model = nn.Sequential(Laid(five_dimensions))
    model[0].num_heads = None
    with pytest.warns(EmberWarning, match='set the attribute num_heads of the module'):
        te = torchEmber(model, attention=True)
        model(torch.randn(3, 9, 16))
    te.close()


def test_exchanged_heads_and_positions_are_found():
    def attend(q, k, v): return F.scaled_dot_product_attention(q, k, v), None
    model = nn.Sequential(Laid(attend), Laid(attend))
    with pytest.warns(EmberWarning, match=r'have the shape \(3, 9, 4, 4\), and the module has 4 heads') as given:
        te = torchEmber(model, attention=True)
        for _ in range(2): model(torch.randn(3, 9, 16))
    te.close()
    assert len(given)==1 and not len(heads(te))
    found = diagnose(te)
    assert (found['severity']=='warning')[found['text'].str.contains('attend to the heads of this position')].tolist()==[True]


@pytest.mark.parametrize('name', ['LongformerModel', 'BigBirdModel'])
def test_sparse_attention_of_hugging_face_has_rows_only_where_they_are_right(name):
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = getattr(transformers, name).config_class(**sizes, **undropped, **dict(LongformerModel=dict(attention_window=4),
        BigBirdModel=dict(attention_type='block_sparse', block_size=4, num_random_blocks=1))[name])
    model = getattr(transformers, name)(config)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter('always')
        te = torchEmber(model, attention=True)
        model(torch.randint(0, 60, (2, 48)))
    te.close()
    rows = heads(te)
    assert set(rows['tname']) <= {f'head_{i}' for i in range(4)}
    assert 'The module has 4 heads' in str([str(w.message) for w in given])
