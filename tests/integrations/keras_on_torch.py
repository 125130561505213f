"Keras's `fit` with `EmberCallback`: the rows are those of the tensors, and the training is the one that it was. Run by test_keras_callback.py"
import re
import zipfile

import keras
import numpy as np
import pytest
import torch
from looped import heard, table
from oracle import says
from torch import nn

from torchember import emberTracker
from torchember.integrations.keras import EmberCallback, as_modules

pytestmark = pytest.mark.filterwarnings('ignore')
L = keras.layers


class Scale(L.Layer):
    "A layer in a layer, with a weight of its own"
    def __init__(self):
        super().__init__(name='scaled')
        self.inner = L.Dense(6, name='inner')
        self.scale = self.add_weight(shape=(6,), initializer='ones', name='scale')
        self.shift = self.add_weight(shape=(6,), initializer='ones', name='scale', trainable=False)

    def call(self, x): return self.inner(x)*self.scale+self.shift


def sequential(): return keras.Sequential([L.Input((4,)), L.Dense(6, activation='tanh', name='a'), L.Dense(3, name='b')])


def functional():
    "Shared, nested, of torch, and in a layer of somebody's"
    x = L.Input((4,))
    shared = L.Dense(6, name='shared')
    h = shared(shared(Scale()(x)))
    h = L.TorchModuleWrapper(nn.Linear(6, 5), name='wrapped', output_shape=(None, 5))(h)
    return keras.Model(x, keras.Sequential([L.Input((5,)), L.Dense(3, name='last')], name='head')(h))


def noisy(): return keras.Sequential([L.Input((4,)), L.Dense(6, name='a'), L.BatchNormalization(name='bn'), L.Dropout(.5), L.Dense(3, name='b')])


def compiled(make=sequential, rate=.1, **options):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(keras.optimizers.SGD(rate, momentum=.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def data(n=20):
    g = np.random.default_rng(0)
    return g.standard_normal((n, 4)).astype('float32'), g.integers(0, 3, n)


def fit(model, *callbacks, n=20, **options):
    x,y = data(n)
    with heard() as said: model.fit(x, y, **{**dict(batch_size=5, shuffle=False, verbose=0, callbacks=[*callbacks]), **options})
    assert not said, said
    return model


def by_hand(model, epochs=1, n=20):
    "Keras's `train_step` in a plain loop: (type, step, path) -> tensor, by hooks of torch"
    tensors,step,(x,y) = {},0,data(n)
    with as_modules(model): modules,params = dict(model.named_modules()),dict(model.named_parameters())
    def hook(path):
        def hear(m, args, out): tensors.setdefault(('output', step, path), []).append(out.detach().clone())
        return hear
    hooks = [m.register_forward_hook(hook(n)) for n,m in modules.items() if not isinstance(m, nn.ParameterDict)]
    losses = []
    for _ in range(epochs):
        for i in range(0, n, 5):
            out = model(x[i:i+5], training=True)
            model.zero_grad()
            loss = model.compute_loss(x[i:i+5], torch.tensor(y[i:i+5]), out)
            loss.backward()
            losses.append(loss.item())
            for name,p in params.items():
                tensors['weight', step, name] = [p.detach().clone()]
                if p.grad is not None: tensors['weight_grad', step, name] = [p.grad.clone()]
            weights = model.trainable_weights
            with torch.no_grad(): model.optimizer.apply([w.value.grad for w in weights], weights)
            step += 1
    for h in hooks: h.remove()
    return {(*k, i): x for k,xs in tensors.items() for i,x in enumerate(xs)}, losses


class Ran:
    "A run that is over, as `looped` has it"
    def __init__(self, name): self.t = emberTracker(name)


def ran(ember): return Ran(ember.report['run'])
def lines(ember): return [*ran(ember).t.lines()]
def path_of(row): return '.'.join(filter(None, (re.sub(r'\([^)]*\)', '', row['module']).removeprefix('model').lstrip('.'), row.get('pname'))))
def numbers(ember, name): return {r['step']: r[name] for r in lines(ember) if r['ttype']=='scalar' and name in r}
def steps_of(run): return sorted({r['step'] for r in emberTracker(run).lines()})
def arrays(model): return [w.numpy() for w in model.variables]
def equal(a, b): return len(a)==len(b) and all(np.array_equal(x, y) for x,y in zip(a, b, strict=True))


def left(model):
    "What stands on each layer"
    with as_modules(model): layers = [m for m in model.modules() if isinstance(m, L.Layer)]
    return [(type(l).__name__, [*l._modules], sorted(l.__dict__)) for l in layers], len([*model.named_parameters()])


@pytest.mark.parametrize('make', [sequential, functional])
def test_rows_are_those_of_the_tensors(make):
    ember = EmberCallback()
    fit(compiled(make), ember, epochs=2)
    want,_ = by_hand(compiled(make), epochs=2)
    rows = [r for r in lines(ember) if r['ttype'] in ('output', 'weight', 'weight_grad')]
    got = {(r['ttype'], r['step'], path_of(r), r['call']): r for r in rows}
    assert len(got)==len(rows) and got.keys()==want.keys(), {'more': got.keys()-want.keys(), 'fewer': want.keys()-got.keys()}
    for k,x in want.items(): says(got[k], x)


def test_names_of_layers_and_weights():
    model = compiled(functional)
    with as_modules(model): names,modules = sorted(n for n,_ in model.named_parameters()),dict(model.named_modules())
    holders = {n for n,m in modules.items() if isinstance(m, nn.ParameterDict)}
    assert holders=={'scaled.inner.weights', 'scaled.weights', 'shared.weights', 'head.last.weights'} # each weight is where it belongs, and once
    assert '_torch_params' not in model.__dict__
    assert names==sorted(['scaled.inner.weights.kernel', 'scaled.inner.weights.bias', 'scaled.weights.scale', 'scaled.weights.scale_1', 'shared.weights.kernel',
        'shared.weights.bias', 'wrapped.module.weight', 'wrapped.module.bias', 'head.last.weights.kernel', 'head.last.weights.bias'])
    before = left(model)
    with pytest.raises(ValueError, match='broken'), as_modules(model): raise ValueError('broken')
    assert left(model)==before


@pytest.mark.parametrize('make', [noisy, functional])
def test_the_training_is_the_one_that_it_was(make):
    ember = EmberCallback()
    a,b = (fit(compiled(make), *embers, epochs=2, validation_data=data(6)) for embers in ([ember], [])) # each seeded anew
    assert left(a)==left(b) and ember.te is None
    assert equal(arrays(a), arrays(b)) and a.history.history==b.history.history


def test_numbers_of_the_step_that_closed():
    ember = EmberCallback()
    fit(compiled(rate=keras.optimizers.schedules.ExponentialDecay(.1, 1, .5)), ember, epochs=2, validation_data=data(6))
    _,losses = by_hand(compiled(rate=keras.optimizers.schedules.ExponentialDecay(.1, 1, .5)), epochs=2)
    means = [np.mean(losses[4*(i//4):i+1]) for i in range(8)]
    assert numbers(ember, 'loss')==pytest.approx(dict(enumerate(means)), rel=1e-5)
    assert numbers(ember, 'learning_rate')==pytest.approx({i: .1*.5**i for i in range(8)})
    assert [*numbers(ember, 'val_loss')]==[3, 7] and len([r for r in lines(ember) if 'loss' in r])==8
    assert {(r['step'], r['epoch']) for r in lines(ember)}=={(i, i//4) for i in range(8)}


def test_a_validation_is_in_and_what_others_ask_for_is_not():
    class Asks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.evaluate(np.full((2, 4), 100., 'float32'), np.array([0, 1]), verbose=0)
            self.model.predict(np.full((2, 4), 100., 'float32'), verbose=0)
    ember = EmberCallback()
    model = fit(compiled(), ember, Asks(), epochs=2, validation_data=(np.full((2, 4), 7., 'float32'), np.array([0, 1])))
    rows = [r for r in lines(ember) if r.get('phase')=='eval' and r['ttype']=='input' and r['module']=='model(Sequential)']
    assert [(r['step'], r['max']) for r in rows]==[(3, 7), (7, 7)]
    want,_ = by_hand(compiled(), epochs=2)
    got = {(r['ttype'], r['step'], path_of(r), r['call']) for r in lines(ember) if r['ttype'] in ('output', 'weight', 'weight_grad') and 'phase' not in r}
    assert got==want.keys()
    before = lines(ember)
    model.evaluate(*data(4), verbose=0, callbacks=[ember]); model.predict(data(4)[0], verbose=0, callbacks=[ember])
    assert lines(ember)==before and ember.te is None


def test_several_trainings():
    ember,model = EmberCallback(name='mine'),compiled()
    for first in (0, 4):
        fit(model, ember, epochs=1+first//4, initial_epoch=first//4)
        assert ember.report['run']=='mine' and steps_of('mine')==[*range(first+4)]
    assert {(r['step'], r['epoch']) for r in lines(ember)}=={(i, i//4) for i in range(8)}
    fit(compiled(), ember)
    assert ember.report['run']=='mine_2' and steps_of('mine_2')==[0, 1, 2, 3]
    other = EmberCallback()
    fit(model, other)
    assert steps_of(other.report['run'])==[8, 9, 10, 11]


def test_stopped_early():
    ember,model = EmberCallback(),compiled(rate=0.)
    fit(model, keras.callbacks.EarlyStopping('loss', patience=1, restore_best_weights=True), ember, epochs=5)
    assert steps_of(ember.report['run'])==[*range(8)] and ember.te is None and not [l for l in model.layers if 'forward' in l.__dict__]


@pytest.mark.parametrize('first', [True, False])
def test_backup_and_restore(first, tmp_path):
    "Whether it is before or after ours in the list"
    class Broken(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch==1: raise ValueError('broken')
    def pair(): return [EmberCallback(name='mine'), keras.callbacks.BackupAndRestore(str(tmp_path/'backup'))][::-1 if first else 1]
    with pytest.raises(ValueError, match='broken'): fit(compiled(), *(before := pair()), Broken(), epochs=3)
    ember = next(c for c in before if isinstance(c, EmberCallback))
    assert ember.te.armed
    ember.close()
    after = pair()
    model = compiled()
    fit(model, *after, epochs=3)
    assert next(c for c in after if isinstance(c, EmberCallback)).report['run']=='mine' and steps_of('mine')==[*range(12)]
    assert equal(arrays(model), arrays(fit(compiled(), epochs=3)))


class Breaks(keras.callbacks.Callback):
    def __init__(self, error): super().__init__(); self.error = error
    def on_train_batch_end(self, batch, logs=None):
        if batch==1: raise self.error


@pytest.mark.parametrize('error', [ValueError('broken'), KeyboardInterrupt()], ids=['error', 'Ctrl-C'])
def test_after_an_exception(error):
    "Nobody is told. The next training ends the run, and so does `close`; what is computed until then is none of it"
    ember,model = EmberCallback(name='mine'),compiled()
    with pytest.raises(type(error)): fit(model, ember, Breaks(error))
    lost,rows = ember.te,[*ember.te.t.lines()]
    model.evaluate(*data(4), verbose=0); model.predict(data(4)[0], verbose=0)
    assert lost.armed and [*lost.t.lines()]==rows and {r['step'] for r in rows}=={0, 1}
    fit(compiled(), ember)
    assert not lost.armed and ember.report['run']=='mine_2' and not [l for l in (model, *model.layers) if 'forward' in l.__dict__]


def test_with_ends_the_run():
    model = compiled()
    with pytest.raises(ValueError, match='broken'), EmberCallback(name='mine') as ember: fit(model, ember, Breaks(ValueError('broken')))
    assert ember.te is None and ember.report['recorded']==2 and not [l for l in model.layers if 'forward' in l.__dict__]


def test_what_is_saved_is_what_was(tmp_path):
    for name,ember in (('a', [EmberCallback()]), ('b', [])):
        fit(compiled(noisy), *ember, keras.callbacks.ModelCheckpoint(str(tmp_path/f'{name}.keras')))
    a,b = (keras.models.load_model(tmp_path/f'{n}.keras') for n in 'ab')
    assert equal(a.get_weights(), b.get_weights()) and equal(*([v.numpy() for v in m.optimizer.variables] for m in (a, b)))
    assert sorted(zipfile.ZipFile(tmp_path/'a.keras').namelist())==sorted(zipfile.ZipFile(tmp_path/'b.keras').namelist())


def test_steps_that_are_wanted():
    ember = EmberCallback(every=2, ttypes=('output', 'weight_grad'))
    fit(compiled(), ember)
    assert sorted({r['step'] for r in lines(ember) if r['ttype']!='scalar'})==[0, 2] and ember.report['steps']==4


def test_models_of_a_class():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.a,self.more = L.Dense(6, name='a'),[L.Dense(3, name='b')]

        def call(self, x): return self.more[0](keras.ops.tanh(self.a(x)))
    ember = EmberCallback()
    fit(compiled(Net), ember)
    assert {path_of(r) for r in lines(ember) if r['ttype']=='weight_grad'}=={f'{l}.weights.{w}' for l in 'ab' for w in ('kernel', 'bias')}
    assert {path_of(r) for r in lines(ember) if r['ttype']=='output'}=={'', 'a', 'b'}


@pytest.mark.release # compiles
def test_compiled():
    embers = EmberCallback(),EmberCallback()
    for ember,jit in zip(embers, (True, False), strict=True): fit(compiled(jit_compile=jit), ember)
    a,b = ({k: r for k,r in table(ran(e)).items() if k[2]!='scalar'} for e in embers)
    assert a.keys()==b.keys()
    for k,r in b.items(): assert a[k]['mean']==pytest.approx(r['mean'], abs=1e-6)


def test_wrong_arguments_at_once():
    with pytest.raises(TypeError, match="No argument of EmberCallback 'stat'.*Known"): EmberCallback(stat='full')
    with pytest.raises(TypeError, match='takes optimizer from the trainer'): EmberCallback(optimizer=None)
