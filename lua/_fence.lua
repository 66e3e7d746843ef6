-- The guard of every script that acts for an owner: its token must equal the one in the fence.
--
-- Tokens have no order. A fence without a token equals no argument, because an argument is never
-- false. `superseded` returns the refusal, or nil and the token, epoch and owner of the fence.

local function superseded(fence, token)
  local held = redis.call('HMGET', fence, 'token', 'epoch', 'owner')
  if held[1] ~= token then
    return {'FENCED', held[2] or '0', held[3] or ''}
  end
  return nil, held
end
