"Data shared by several trainings of the zoo, and checks that a model has learned"
import torch
from sklearn import datasets


def standard(x):
    "Scale the columns of a table to mean 0 and standard deviation 1."
    x = torch.as_tensor(x, dtype=torch.float32)
    return (x-x.mean(0))/x.std(0).clamp(min=1e-6)


def digits(images=False, classes=range(10)):
    "Return images of 8 by 8 pixels, and the digits that they show."
    x,y = datasets.load_digits(return_X_y=True)
    x,y = torch.tensor(x, dtype=torch.float32)/16,torch.tensor(y)
    keep = torch.isin(y, torch.tensor(list(classes)))
    return (x.view(-1, 1, 8, 8) if images else x)[keep],y[keep]


def batch(size, *tensors):
    at = torch.randint(len(tensors[0]), (size,))
    return [t[at] for t in tensors]


def fell(losses, to=.5):
    "Return True if the last tenth of a positive loss is below the fraction `to` of the first tenth."
    n = max(1, len(losses)//10)
    first,last = sum(losses[:max(1, n//2)])/max(1, n//2),sum(losses[-n:])/n
    assert last<to*first, f'loss went from {first:.4g} to {last:.4g}'


def accuracy(model, x, y):
    was = model.training
    model.eval()
    with torch.no_grad(): right = (model(x).argmax(-1)==y).float().mean().item()
    model.train(was)
    return right


def table(name):
    "Return a data set of scikit-learn: standardized features, and targets."
    x,y = getattr(datasets, f'load_{name}')(return_X_y=True)
    return standard(x),torch.tensor(y)


def text():
    "Return an English text with some code as an array of character numbers, and the number of different characters."
    docs = '\n'.join(getattr(torch.nn, n).__doc__ for n in ('Linear', 'Conv2d', 'LSTM', 'BatchNorm1d', 'Transformer', 'Embedding', 'Dropout', 'CTCLoss'))
    letters = sorted(set(docs))
    return torch.tensor([letters.index(c) for c in docs]),len(letters)


def windows(size, length, series):
    "Return `size` random windows of a series of numbers."
    at = torch.randint(len(series)-length+1, (size, 1))
    return series[at+torch.arange(length)]


def plain(te, opt, n, loss_of, after=lambda: None):
    "Run the usual training loop. Return the losses."
    losses = []
    for _ in range(n):
        opt.zero_grad()
        loss = loss_of()
        te.log(loss=loss)
        loss.backward()
        opt.step()
        after()
        losses.append(loss.item())
    return losses
