"Models of many kinds for tests. `zoo`: name -> function that returns a model and its inputs"
import torch
from torch import nn


class AlexNet(nn.Module):
    def __init__(self, classes=1000):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(256*36, 4096), nn.ReLU(inplace=True),
            nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, classes))

    def forward(self, x): return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1,self.conv2 = (nn.Conv2d(c, c, 3, padding=1, bias=False) for _ in range(2))
        self.bn1,self.bn2 = nn.BatchNorm2d(c),nn.BatchNorm2d(c)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


class Dicts(nn.Module):
    "A model with keyword arguments, a dict as output, a layer that is called three times, and a shared layer"
    def __init__(self):
        super().__init__()
        self.cell,self.head = nn.Linear(4, 4),nn.Linear(4, 2)
        self.twin = self.head

    def forward(self, x, *, mask=None, past=()):
        for _ in range(3): x = self.cell(x).tanh()
        if mask is not None: x = x*mask
        return {'logits': self.head(x), 'state': (x, [self.twin(x)]), 'past': past}


class Routed(nn.Module):
    "A mixture of experts, in which the data decide which experts are called"
    def __init__(self):
        super().__init__()
        self.gate,self.experts = nn.Linear(8, 4),nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        best,out = self.gate(x).argmax(-1),torch.zeros_like(x)
        for i in best.unique().tolist(): out[best==i] = self.experts[i](x[best==i])
        return out


def transformer(kind, config, **sizes):
    import transformers
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    ids = torch.randint(0, 50, (2, 12))
    return model, (), {'input_ids': ids} | ({'labels': ids} if 'LM' in kind else {})


small = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
zoo = {
    'mlp': lambda: (nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 3)), (torch.randn(5, 8),), {}),
    'residual': lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
        (torch.randn(2, 3, 9, 9),), {}),
    'lstm': lambda: (nn.LSTM(8, 6, num_layers=2, bidirectional=True), (torch.randn(7, 2, 8),), {}),
    'gru cell': lambda: (nn.GRUCell(8, 6), (torch.randn(2, 8),), {}),
    'encoder': lambda: (nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), (torch.randn(2, 5, 16),), {}),
    'attention': lambda: (nn.MultiheadAttention(16, 2, batch_first=True), tuple(torch.randn(3, 2, 5, 16)), {}),
    'embedding bag': lambda: (nn.Sequential(nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 2)), (torch.randint(0, 20, (3, 4)),), {}),
    'dicts': lambda: (Dicts(), (torch.randn(3, 4),), {'mask': torch.ones(3, 4), 'past': ((torch.ones(1), None),)}),
    'routed': lambda: (Routed(), (torch.randn(10, 8),), {}),
    'spectral norm': lambda: (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.utils.parametrizations.weight_norm(nn.Linear(8, 2))),
        (torch.randn(3, 8),), {}),
    'no parameters': lambda: (nn.Sequential(nn.Softplus(), nn.Identity()), (torch.randn(3, requires_grad=True),), {}),
    'gpt2': lambda: transformer('GPT2LMHeadModel', 'GPT2Config', vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0),
    'bert': lambda: transformer('BertForMaskedLM', 'BertConfig', max_position_embeddings=16, **small),
    't5': lambda: transformer('T5EncoderModel', 'T5Config', vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    'llama': lambda: transformer('LlamaForCausalLM', 'LlamaConfig', num_key_value_heads=2, max_position_embeddings=16, **small),
    'mixtral': lambda: transformer('MixtralForCausalLM', 'MixtralConfig', num_key_value_heads=2, num_local_experts=4, **small),
    'vit': lambda: (transformer('ViTModel', 'ViTConfig', image_size=16, patch_size=4, **{k:v for k,v in small.items() if k!='vocab_size'})[0],
        (), {'pixel_values': torch.randn(2, 3, 16, 16)}),
    'whisper': lambda: (transformer('WhisperModel', 'WhisperConfig', vocab_size=60, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
        max_source_positions=10, max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1)[0], (), {'input_features': torch.randn(1, 8, 20), 'decoder_input_ids': torch.ones(1, 3, dtype=torch.long)}),
}


def x(n=2): return torch.ones(n, 4)
def mlp(): return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def tensors(value):
    "Return a list of all tensors in nested lists, tuples and dicts."
    if isinstance(value, torch.Tensor): return [value]
    if hasattr(value, 'values') and callable(value.values): value = list(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, list|tuple) else []
