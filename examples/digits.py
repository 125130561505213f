"Train a small convolutional network on scikit-learn's handwritten digits, and look inside: about half a minute"
from pathlib import Path

import matplotlib

matplotlib.use('agg')
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from torchember import torchEmber

torch.manual_seed(0)
digits = load_digits()
x,y = torch.tensor(digits.images, dtype=torch.float32)[:, None]/16,torch.tensor(digits.target)
train,test = slice(0, 1500),slice(1500, None)
model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
opt = torch.optim.AdamW(model.parameters(), 3e-3)
loss_fn = nn.CrossEntropyLoss()

te = torchEmber(model, every=5, only_training=True)
for epoch in range(6):
    te.mark(epoch=epoch)
    for batch in torch.randperm(1500).split(50):
        loss = loss_fn(model(x[train][batch]), y[train][batch])
        loss.backward()
        opt.step()
        te.step() # here the gradients are still there
        opt.zero_grad()
    with torch.no_grad(): right = (model.eval()(x[test]).argmax(1)==y[test]).float().mean()
    model.train()
    print(f'epoch {epoch}: loss of the last batch {loss:.3f}, {right:.1%} of unseen digits right')
report = te.close()

df = te.t.df
df['layer'] = df.module.str.removeprefix('model(Sequential).')
out = Path(__file__).parent/'out'
out.mkdir(exist_ok=True)
latest = te.t.latest_df
latest.to_csv(out/'latest.csv', index=False)
print('\nThe latest step:\n')
print(latest[['module', 'ttype', 'tname', 'shape', 'mean', 'std', 'max', 'min']].to_string(index=False, float_format='%.4f'))

fig,axes = plt.subplots(1, 3, figsize=(13, 4), layout='constrained')
for ax,ttype,title in zip(axes, ('output', 'weight', 'weight_grad'), ('activations', 'weights', 'weight gradients'), strict=True):
    rows = df[(df.ttype==ttype) & df.layer.str.contains('Conv2d|Linear') & (df.pname.isna() | (df.pname=='weight'))]
    for layer,g in rows.groupby('layer', sort=False): ax.plot(g.step, g['std'], label=layer)
    ax.set(title=f'standard deviation of {title}', xlabel='step', yscale='log')
axes[0].legend()
fig.savefig(out/'digits.png', dpi=110)
print(f"\n{report['rows']} rows of {report['recorded']} recorded steps in {te.t.log_path}")
print(f'Table: {out/"latest.csv"}\nFigure: {out/"digits.png"}')
