"Tests of Keras's `fit` with `EmberCallback`, run by test_keras_callback.py: rows equal the tensors, and the training is unchanged"
import re
import zipfile

import keras
import numpy as np
import pytest
import torch
from looped import heard, table
from oracle import says
from torch import nn

from torchember import diagnose, emberTracker
from torchember.integrations.keras import EmberCallback, expose_modules

pytestmark = pytest.mark.filterwarnings('ignore')
L = keras.layers


class Scale(L.Layer):
    "A layer with an inner layer and a weight of its own"
    def __init__(self):
        super().__init__(name='scaled')
        self.inner = L.Dense(6, name='inner')
        self.scale = self.add_weight(shape=(6,), initializer='ones', name='scale')
        self.shift = self.add_weight(shape=(6,), initializer='ones', name='scale', trainable=False)

    def call(self, x): return self.inner(x)*self.scale+self.shift


def sequential(): return keras.Sequential([L.Input((4,)), L.Dense(6, activation='tanh', name='a'), L.Dense(3, name='b')])


def functional():
    "Return a model with a shared layer, a nested model, a torch module, and a custom layer that contains a layer."
    x = L.Input((4,))
    shared = L.Dense(6, name='shared')
    h = shared(shared(Scale()(x)))
    h = L.TorchModuleWrapper(nn.Linear(6, 5), name='wrapped', output_shape=(None, 5))(h)
    return keras.Model(x, keras.Sequential([L.Input((5,)), L.Dense(3, name='last')], name='head')(h))


def two_outputs():
    x = L.Input((4,))
    h = L.Dense(6, activation='tanh', name='h')(x)
    return keras.Model(x, [L.Dense(3, name='classes')(h), L.Dense(1, name='value')(h)])


def noisy(): return keras.Sequential([L.Input((4,)), L.Dense(6, name='a'), L.BatchNormalization(name='bn'), L.Dropout(.5, name='drop'), L.Dense(3, name='b')])


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
    "Train with Keras's `train_step` in a plain loop. Return the tensors that torch hooks see: (type, step, path) -> tensor."
    tensors,step,(x,y) = {},0,data(n)
    with expose_modules(model): modules,params = dict(model.named_modules()),dict(model.named_parameters())
    def hook(path):
        def hear(m, args, out): tensors.setdefault(('output', step, path), []).append(out.detach().clone())
        return hear
    hooks = [m.register_forward_hook(hook(n)) for n,m in modules.items()]
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
    "A finished run, with a tracker in the attribute `t`, like an ember"
    def __init__(self, name): self.t = emberTracker(name)


def ran(ember): return Ran(ember.report['run'])
def lines(ember): return [*ran(ember).t.lines()]
def path_of(row): return '.'.join(filter(None, (re.sub(r'\([^)]*\)', '', row['module']).removeprefix('model').lstrip('.'), row.get('pname'))))
def numbers(ember, name): return {r['step']: r[name] for r in lines(ember) if r['ttype']=='scalar' and name in r}
def steps_of(run): return sorted({r['step'] for r in emberTracker(run).lines()})
def arrays(model): return [w.numpy() for w in model.variables]
def equal(a, b): return len(a)==len(b) and all(np.array_equal(x, y) for x,y in zip(a, b, strict=True))


def left(model):
    "Return the attributes of each layer, to check that nothing is left behind."
    with expose_modules(model): layers = [m for m in model.modules() if isinstance(m, L.Layer)]
    metrics = [sorted(vars(m)) for m in model.metrics]
    return [(type(l).__name__, [*l._modules], [*l._parameters], [*l._buffers], sorted(l.__dict__)) for l in layers], len([*model.named_parameters()]), metrics


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
    with expose_modules(model): names,buffers,modules = ([n for n,_ in named()] for named in (model.named_parameters, model.named_buffers, model.named_modules))
    assert sorted(modules)==['', 'head', 'head.last', 'scaled', 'scaled.inner', 'shared', 'wrapped', 'wrapped.module']
    assert '_torch_params' not in model.__dict__
    assert sorted(names)==sorted(['scaled.inner.kernel', 'scaled.inner.bias', 'scaled.scale', 'shared.kernel', 'shared.bias', 'wrapped.module.weight',
        'wrapped.module.bias', 'head.last.kernel', 'head.last.bias']) # each weight has the path of its layer, and is there once
    assert set(buffers)=={'loss_total', 'loss_count', 'scaled.scale_1'} # These variables are not trained
    before = left(model)
    with pytest.raises(ValueError, match='broken'), expose_modules(model): raise ValueError('broken')
    assert left(model)==before


@pytest.mark.parametrize('make', [noisy, functional])
def test_callback_does_not_change_training(make):
    ember = EmberCallback()
    # `fit` sets the seed for each training
    a,b = (fit(compiled(make), *embers, epochs=2, validation_data=data(6)) for embers in ([ember], []))
    assert left(a)==left(b) and ember.te is None
    assert equal(arrays(a), arrays(b)) and a.history.history==b.history.history


def test_numbers_of_the_step_that_closed():
    ember = EmberCallback()
    fit(compiled(rate=keras.optimizers.schedules.ExponentialDecay(.1, 1, .5)), ember, epochs=2, validation_data=data(6))
    _,losses = by_hand(compiled(rate=keras.optimizers.schedules.ExponentialDecay(.1, 1, .5)), epochs=2)
    # Losses of single batches, not the mean of the epoch that Keras reports
    assert numbers(ember, 'loss')==dict(enumerate(losses))
    assert numbers(ember, 'learning_rate')==pytest.approx({i: .1*.5**i for i in range(8)})
    assert [*numbers(ember, 'val_loss')]==[3, 7] and len([r for r in lines(ember) if 'loss' in r])==8
    assert {(r['step'], r['epoch']) for r in lines(ember)}=={(i, i//4) for i in range(8)}


def test_validation_is_recorded_and_other_evaluations_are_not():
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
    "The callback `BackupAndRestore` may stand before or after `EmberCallback`."
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
    "Keras does not notify callbacks of an exception. The next training or `close` ends the run; other passes are not recorded."
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


def test_saved_model_is_unchanged(tmp_path):
    for name,ember in (('a', [EmberCallback()]), ('b', [])):
        fit(compiled(noisy), *ember, keras.callbacks.ModelCheckpoint(str(tmp_path/f'{name}.keras')))
    a,b = (keras.models.load_model(tmp_path/f'{n}.keras') for n in 'ab')
    assert equal(a.get_weights(), b.get_weights()) and equal(*([v.numpy() for v in m.optimizer.variables] for m in (a, b)))
    assert sorted(zipfile.ZipFile(tmp_path/'a.keras').namelist())==sorted(zipfile.ZipFile(tmp_path/'b.keras').namelist())


def test_every_selects_steps():
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
    assert {path_of(r) for r in lines(ember) if r['ttype']=='weight_grad'}=={f'{l}.{w}' for l in 'ab' for w in ('kernel', 'bias')}
    assert {path_of(r) for r in lines(ember) if r['ttype']=='output'}=={'', 'a', 'b'}


@pytest.mark.release # This test compiles
def test_compiled():
    embers = EmberCallback(),EmberCallback()
    for ember,jit in zip(embers, (True, False), strict=True): fit(compiled(jit_compile=jit), ember)
    assert numbers(embers[0], 'loss')==pytest.approx(numbers(embers[1], 'loss'), rel=1e-6)
    a,b = ({k: r for k,r in table(ran(e)).items() if k[2]!='scalar'} for e in embers)
    assert a.keys()==b.keys()
    for k,r in b.items(): assert a[k]['mean']==pytest.approx(r['mean'], abs=1e-6)


def test_losses_of_several_outputs_are_those_of_the_batch():
    x,y = data()
    model,ember = two_outputs(),EmberCallback()
    model.compile('sgd', [keras.losses.SparseCategoricalCrossentropy(from_logits=True), 'mse'], loss_weights=[1., 3.])
    model.fit(x, [y, y.astype('float32')], batch_size=5, epochs=2, verbose=0, shuffle=False, callbacks=[ember])
    out = {(r['step'], r['module']): r for r in lines(ember) if r['ttype']=='output'}
    total,classes,value = (numbers(ember, n) for n in ('loss', 'classes_loss', 'value_loss'))
    assert [*total]==[*range(8)] and len({*classes.values()})==8
    for i in range(8):
        r,target = out[i, 'model(Functional).value(Dense)'],y[5*(i%4):5*(i%4)+5].astype(float)
        assert total[i]==pytest.approx(classes[i]+3*value[i], rel=1e-5)
        # The squared error is at least the squared difference of the means
        assert value[i]>=(r['mean']-target.mean())**2-1e-6


def test_a_loss_of_single_samples_is_their_mean():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.d,self.tracker,self.seen = L.Dense(3),keras.metrics.Mean(name='loss'),[]

        metrics = property(lambda self: [self.tracker])

        def call(self, x): return self.d(x)

        def train_step(self, batch):
            self.zero_grad()
            each = keras.losses.sparse_categorical_crossentropy(batch[1], self(batch[0], training=True), from_logits=True)
            each.mean().backward()
            weights = self.trainable_variables
            with torch.no_grad(): self.optimizer.apply([w.value.grad for w in weights], weights)
            self.tracker.update_state(each)
            self.seen.append(each.mean().item())
            return {'loss': self.tracker.result()}
    ember = EmberCallback()
    model = fit(compiled(Own), ember, epochs=2)
    assert numbers(ember, 'loss')==pytest.approx(dict(enumerate(model.seen)), rel=1e-6)


def test_a_loop_by_hand_with_train_on_batch():
    ember,model = EmberCallback(),compiled()
    x,y = data()
    ember.set_model(model)
    ember.on_train_begin()
    losses = []
    for i in range(4):
        ember.on_train_batch_begin(i)
        logs = model.train_on_batch(x[5*i:5*i+5], y[5*i:5*i+5], return_dict=True)
        ember.on_train_batch_end(i, logs)
        losses.append(logs['loss'])
    ember.on_train_end()
    assert numbers(ember, 'loss')==pytest.approx(dict(enumerate(losses)), rel=1e-6)
    assert {path_of(r) for r in lines(ember) if r['ttype']=='weight_grad'}=={'a.kernel', 'a.bias', 'b.kernel', 'b.bias'}


@pytest.mark.parametrize(('make', 'states'), [(lambda: keras.optimizers.SGD(.1, momentum=.9), ['momentum']),
    (lambda: keras.optimizers.Adam(.1), ['momentum', 'velocity']), (lambda: keras.optimizers.RMSprop(.1, momentum=.5), ['momentum', 'velocity'])],
    ids=['SGD', 'Adam', 'RMSprop'])
def test_states_and_updates_of_a_keras_optimizer(make, states):
    ember,model = EmberCallback(ttypes=('weight', 'optimizer', 'update')),compiled()
    model.optimizer = make()
    before = []
    class Weights(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None): before[:] = [w.value.detach().clone() for w in self.model.trainable_weights]
    fit(model, Weights(), ember)
    last = {(r['ttype'], path_of(r), r['tname']): r for r in lines(ember) if r['step']==3 and r['ttype']!='scalar'}
    paths = [('a.kernel', 0), ('a.bias', 1), ('b.kernel', 0), ('b.bias', 1)]
    assert {k for k in last if k[0]=='optimizer'}=={('optimizer', p, f'{s}_{i}') for p,i in paths for s in states}
    for (path,i),was,w in zip(paths, before, model.trainable_weights, strict=True):
        says(last['weight', path, f'weight_{i}'], was)
        says(last['update', path, f'update_{i}'], w.value.detach()-was)
        for s in states:
            [state] = [v for v in model.optimizer.variables if v.name==f"{w.path.replace('/', '_')}_{s}"]
            says(last['optimizer', path, f'{s}_{i}'], state.value.detach())


def test_running_statistics_and_seeds_are_buffers():
    ember = EmberCallback(ttypes=('weight', 'buffer'))
    model = fit(compiled(noisy), ember)
    rows = lines(ember)
    assert {path_of(r) for r in rows if r['ttype']=='weight'}=={'a.kernel', 'a.bias', 'bn.gamma', 'bn.beta', 'b.kernel', 'b.bias'}
    assert {path_of(r) for r in rows if r['ttype']=='buffer'}=={'bn.moving_mean', 'bn.moving_variance', 'drop.seed_generator_state', 'loss_total',
        'loss_count'}
    last = {path_of(r): r for r in rows if r['ttype']=='buffer'}
    says(last['bn.moving_mean'], model.get_layer('bn').moving_mean.value.detach())
    known = emberTracker(ember.report['run'])[f"parameters_{ember.report['run']}"]['parameters']
    assert all(p['requires_grad'] and p['optimizer'] for p in known) and len(known)==6


def test_a_frozen_layer_keeps_its_weights_as_parameters():
    ember,model = EmberCallback(ttypes=('weight', 'weight_grad', 'buffer')),noisy()
    for name in 'a','bn': model.get_layer(name).trainable = False
    fit(compiled(lambda: model), ember)
    known = emberTracker(ember.report['run'])[f"parameters_{ember.report['run']}"]['parameters']
    assert {(p['path'], p['name']): (p['requires_grad'], p['optimizer']) for p in known}=={**{(l, w): (False, False) for l,w in (('a', 'kernel'), ('a', 'bias'),
        ('bn', 'gamma'), ('bn', 'beta'))}, ('b', 'kernel'): (True, True), ('b', 'bias'): (True, True)}
    assert {path_of(r) for r in lines(ember) if r['ttype']=='weight_grad'}=={'b.kernel', 'b.bias'}


def test_two_layers_of_one_name_are_both_recorded():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.one,self.other = L.Dense(6, name='same'),L.Dense(3, name='same')

        def call(self, x): return self.other(self.one(x))
    ember = EmberCallback(ttypes=('weight', 'optimizer'))
    fit(compiled(Net), ember)
    shapes = {path_of(r): r['shape'] for r in lines(ember) if r['ttype']=='weight'}
    assert shapes=={'same.kernel': [4, 6], 'same.bias': [6], 'same_1.kernel': [6, 3], 'same_1.bias': [3]}
    assert {path_of(r): r['shape'] for r in lines(ember) if r['ttype']=='optimizer'}==shapes


def test_weights_of_recurrent_and_attention_layers():
    x = L.Input((6,))
    h = L.Embedding(9, 4, name='words')(x)
    h = L.MultiHeadAttention(2, 3, name='look')(h, h)
    h = L.LSTM(5, name='lstm')(L.Bidirectional(L.GRU(2, return_sequences=True, name='gru'), name='both')(L.Conv1D(4, 2, name='conv')(h)))
    model,ember = keras.Model(x, L.Dense(3, name='last')(h)),EmberCallback(ttypes=('weight', 'weight_grad'))
    model.compile('adam', keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    g = np.random.default_rng(0)
    model.fit(g.integers(0, 9, (10, 6)), data(10)[1], batch_size=5, verbose=0, callbacks=[ember])
    cells,weights = ['both.forward_gru.gru_cell', 'both.backward_gru.gru_cell', 'lstm.lstm_cell'],('kernel', 'recurrent_kernel', 'bias')
    want = {f'{c}.{w}' for c in cells for w in weights} | {f'{l}.{w}' for l in ('look.query', 'look.key', 'look.value', 'look.attention_output', 'conv', 'last')
        for w in ('kernel', 'bias')} | {'words.embeddings'}
    for t in 'weight','weight_grad': assert {path_of(r) for r in lines(ember) if r['ttype']==t}==want


def test_gradients_under_a_loss_scale_are_those_of_the_loss():
    scaled = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(.1), initial_scale=1024.)
    rows = []
    for make in scaled,lambda: keras.optimizers.SGD(.1, loss_scale_factor=64.),lambda: keras.optimizers.SGD(.1):
        ember,model = EmberCallback(ttypes=('output_grad', 'weight_grad')),compiled()
        model.optimizer = make()
        fit(model, ember)
        rows.append({k: (r['mean'], r['std']) for k,r in table(ran(ember), 'output_grad', 'weight_grad').items()})
    assert len(rows[0])==4*7 and rows[0].keys()==rows[1].keys()==rows[2].keys()
    for k,want in rows[2].items():
        for some in rows[:2]: assert some[k]==pytest.approx(want, rel=1e-4, abs=1e-8)


def test_steps_that_a_loss_scale_skips_are_marked():
    ember,model = EmberCallback(name='mine', ttypes=('weight_grad', 'update')),compiled(loss_weights=64.)
    # With this scale, the first gradients are infinite
    model.optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial_scale=2.**127)
    fit(model, ember, epochs=4)
    rows = [r for r in lines(ember) if r['ttype']=='weight_grad']
    skipped = {r['step'] for r in rows if r.get('skipped')}
    # The first steps are skipped, until the scale is small enough
    assert skipped=={*range(len(skipped))} and 0<len(skipped)<16
    assert {r['step'] for r in lines(ember) if r['ttype']=='update'}=={*range(len(skipped), 16)}
    assert int(model.optimizer.iterations)==16-len(skipped)
    fit(model, ember) # Keras does not count skipped steps, but torchember does
    assert ember.report['run']=='mine' and steps_of('mine')==[*range(20)]


def test_a_second_fit_with_accumulated_gradients_continues_the_run():
    ember,model = EmberCallback(name='mine', ttypes=('update',)),compiled()
    model.optimizer = keras.optimizers.SGD(.1, gradient_accumulation_steps=3)
    for _ in range(2): fit(model, ember)
    assert ember.report['run']=='mine' and steps_of('mine')==[*range(8)]
    moved = {r['step'] for r in lines(ember) if r['ttype']=='update' and r['max']>r['min']}
    assert moved=={2, 5} # a batch is a step, and each third one updates the weights


@pytest.mark.parametrize(('layer', 'rule'), [
    (lambda: L.Dense(6, activation='relu', bias_initializer=keras.initializers.Constant(-100.), name='a'), 'dead_units'),
    (lambda: L.Dense(6, activation='sigmoid', kernel_initializer=keras.initializers.RandomNormal(stddev=300.), name='a'), 'saturated'),
    (lambda: L.Dense(6, activation='tanh', kernel_initializer=keras.initializers.RandomNormal(stddev=300.), name='a'), 'saturated'),
    (lambda: L.Dense(6, activation='tanh', name='a'), None)], ids=['ReLU', 'Sigmoid', 'Tanh', 'healthy'])
def test_rules_know_the_activation_of_a_layer(layer, rule):
    ember = EmberCallback()
    fit(compiled(lambda: keras.Sequential([L.Input((4,)), layer(), L.Dense(3, name='b')]), rate=1e-3), ember, epochs=3)
    found = diagnose(ember.report['run'])
    assert [(f.rule, f.path) for f in found.itertuples() if f.rule in ('dead_units', 'saturated')]==([(rule, 'a')] if rule else [])


def test_rules_do_not_take_an_activation_inside_a_layer_for_its_output():
    class Doubles(L.Layer):
        def __init__(self):
            super().__init__(name='doubles')
            self.activation = keras.activations.tanh

        def call(self, x): return 20*self.activation(1e3*x)
    ember = EmberCallback()
    fit(compiled(lambda: keras.Sequential([L.Input((4,)), Doubles(), L.Dense(3, name='b')]), rate=1e-5), ember, epochs=3)
    assert not [f for f in diagnose(ember.report['run']).itertuples() if f.rule=='saturated']


def test_every_parameter_is_looked_at_by_diagnose():
    ember = EmberCallback()
    fit(compiled(noisy), ember, epochs=4)
    found = diagnose(ember.report['run'])
    assert not [f for f in found.itertuples() if f.rule=='not_trained']
    assert 'the parameters of the optimizer' not in dict(found.missing)


def test_wrong_arguments_at_once():
    with pytest.raises(TypeError, match="No argument of EmberCallback 'stat'.*Known"): EmberCallback(stat='full')
    with pytest.raises(TypeError, match='takes optimizer from the trainer'): EmberCallback(optimizer=None)
