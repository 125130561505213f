"Train a small convolutional network on scikit-learn's handwritten digits in half a minute, and show its tensors"
from collections import OrderedDict
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

from torchember import report, scalar_line, torchEmber

torch.manual_seed(0)
digits = load_digits()
x,y = torch.tensor(digits.images, dtype=torch.float32)[:, None]/16,torch.tensor(digits.target)
train,test = slice(0, 1500),slice(1500, None)
model = nn.Sequential(OrderedDict(
    conv1=nn.Conv2d(1, 32, 3, padding=1), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
    conv2=nn.Conv2d(32, 64, 3, padding=1), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2), flat=nn.Flatten(),
    hidden=nn.Linear(256, 128), relu3=nn.ReLU(), head=nn.Linear(128, 10)))
opt = torch.optim.AdamW(model.parameters(), 1e-3)
loss_fn = nn.CrossEntropyLoss()

# 'numerics' also counts elements by their magnitude
te = torchEmber(model, every=10, only_training=True, stats='numerics')
bar = tqdm(total=12*30, unit='batch')
for epoch in range(12):
    te.mark(epoch=epoch)
    for batch in torch.randperm(1500).split(50):
        loss = loss_fn(model(x[train][batch]), y[train][batch])
        te.log(loss=loss)
        loss.backward()
        opt.step()
        te.step() # before zero_grad, so the gradients still exist
        opt.zero_grad()
        bar.set_postfix(loss=f'{loss:.3f}', refresh=False)
        bar.update()
    with torch.no_grad(): right = (model.eval()(x[test]).argmax(1)==y[test]).float().mean()
    model.train()
    bar.write(f'epoch {epoch}: loss of the last batch {loss:.3f}, {right:.1%} of unseen digits right')
bar.close()
closing = te.close()

out = Path(__file__).parent/'out'
out.mkdir(exist_ok=True)
latest = te.t.latest_df
latest.to_csv(out/'latest.csv', index=False)
print('\nThe latest step:\n')
tensors = latest[latest.ttype!='scalar']
print(tensors[['path', 'ttype', 'pname', 'shape', 'mean', 'std', 'abs_max', 'abs_min']].fillna({'pname': ''}).to_string(index=False, float_format='%.4f'))
scalar_line(te, ttype=['output', 'weight', 'weight_grad'], stat='std', figsize=(15, 4)).savefig(out/'digits.png', dpi=110)
te.show().figure.savefig(out/'overview.png', dpi=150)
report(te, out/'digits.html')
print(f"\n{closing['rows']} rows of {closing['recorded']} recorded steps in {te.t.log_path}")
print(f'Table: {out/"latest.csv"}\nFigures: {out/"overview.png"}, {out/"digits.png"}\nTo click through, in a browser: {out/"digits.html"}')
print("In the overview, the outputs of conv2 to head grow tenfold, just while the loss falls, and their gradients grow with them: all layers learn."
    "\nA layer that got nothing would be a gray row, and the first NaN a red cell, named in the title.")
plt.show() # does nothing without a display
